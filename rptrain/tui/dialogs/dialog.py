"""Dialogs that are opened and answered only once, even if a busy machine delivers keys or clicks twice."""

from textual.screen import ModalScreen, Screen, ScreenResultType


class Dialog(ModalScreen[ScreenResultType]):
    def answer(self, result: ScreenResultType) -> None:
        if self.is_active:
            self.dismiss(result)


async def ask(screen: Screen[None], dialog: Dialog[ScreenResultType]) -> ScreenResultType | None:
    """The answer; None if it was canceled, or if another dialog is already open."""
    return await screen.app.push_screen_wait(dialog) if screen.is_active else None
