"""A question over a screen, asked once and answered once, also where keys and clicks come twice: a machine is busy."""

from textual.screen import ModalScreen, Screen, ScreenResultType


class Dialog(ModalScreen[ScreenResultType]):
    def answer(self, result: ScreenResultType) -> None:
        if self.is_active:
            self.dismiss(result)


async def ask(screen: Screen[None], dialog: Dialog[ScreenResultType]) -> ScreenResultType | None:
    """The answer; None, too, where another question stands over the screen already."""
    return await screen.app.push_screen_wait(dialog) if screen.is_active else None
