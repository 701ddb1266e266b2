"""The Chat screen: a conversation with a run's model, which a process of its own holds."""

import asyncio
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.screen import Screen
from textual.widgets import Input, Label, Static

from rptrain.tui.chat.exchange import Transcript
from rptrain.tui.chat.pick import Pick, PickLine
from rptrain.tui.chat.session import ChatSession, ShownTurn
from rptrain.tui.chat.sources import models_to_ask, readable_sources, run_of
from rptrain.tui.context import Context
from rptrain.tui.dialogs.dialog import ask
from rptrain.tui.messages import TakeBack
from rptrain.tui.services.closing import until_closed
from rptrain.tui.widgets.entry import Entry
from rptrain.tui.widgets.key_bar import KeyBar
from rptrain.tui.widgets.top_bar import TopBar
from rptrain.utils.errors import UserError
from rptrain.utils.paths import from_here
from rptrain.utils.text import one_line, wrapped_parts
from rptrain.utils.units import format_bytes, format_duration, format_rate

PAUSE = 0.1  # seconds between two drawings of an answer that arrives
REMOTE_PAUSE = 0.5  # the same over ssh, where each drawing of a long answer sends about 2 KB
WHERE = {"gpu": "GPU", "streamed": "GPU, streamed", "cpu": "CPU"}
PLACEMENTS = {
    "auto": "the fastest; beside a training, the CPU",
    "gpu": "weights in GPU memory",
    "streamed": "sent to the GPU layer by layer",
    "cpu": "computed on the CPU",
}
HISTORY = "earlier messages are included; ctrl+n starts a new conversation"
WAITS = "a message waits for the model already; up takes it back"
HINTS = {
    "loading": "the model is loading; your message is sent after that",
    "idle": "your message",
    "answering": "esc stops the answer",
    "ended": "ctrl+r loads the model",
}


class Message(Entry):
    """The next message; up takes the last one back."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("up", "screen.edit", "edit")]


class ChatScreen(Screen[None]):
    TITLE = "Chat"
    AUTO_FOCUS = "#message"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+r", "retry", "retry"),
        Binding("ctrl+b", "base(True)", "base: off"),
        Binding("ctrl+b", "base(False)", "base: on"),
        Binding("ctrl+o", "checkpoint", "model"),
        Binding("ctrl+n", "reset", "new chat"),
        Binding("ctrl+g", "place", "placement", show=False),
        Binding("pageup", "scroll(-1)", show=False),
        Binding("pagedown", "scroll(1)", show=False),
        Binding("escape", "back", "back"),
    ]
    KEYS = (
        ("enter", "send the message"),
        ("esc", "stop the answer; then leave. The model stays loaded"),
        ("up", "take the last message back to edit it; in a new conversation, repeat it"),
        ("ctrl+r", "another answer; loads a model that is not loaded"),
        ("ctrl+b", "show the base model's answers too, or no longer, from the next message on"),
        ("ctrl+o", "choose another model or checkpoint, of this run or of another one"),
        ("ctrl+n", "new conversation: forget this one and what is typed, and stop an answer"),
        ("ctrl+g", "choose the placement: GPU, streamed from host memory, CPU"),
        ("tab", "system prompt, temperature, top-p"),
        ("page up, down", "scroll"),
    )

    def __init__(self, context: Context, run: Path) -> None:
        super().__init__()
        self._shared, self._run = context, run
        self._new = True  # something is not drawn yet
        self._pause = REMOTE_PAUSE if "SSH_CONNECTION" in os.environ else PAUSE
        self._named: Path | None = None  # the model whose run the first line names
        self._offered: tuple[str, bool, bool] | None = None  # what the footer depends on, as it was drawn

    def compose(self) -> ComposeResult:
        yield TopBar("runs", str(self._run))
        yield Static("", id="chat-head", markup=False)
        yield Transcript()
        yield Static(HISTORY, id="chat-history", markup=False)
        yield Static("", id="chat-problem", markup=False)
        with Horizontal(classes="row", id="chat-message"):
            yield Label(">", id="chat-prompt")
            yield Message(placeholder="your message", id="message", compact=True)
        with Horizontal(classes="row", id="chat-settings"):
            yield Label("system", classes="label")
            yield Entry(placeholder="no system prompt", id="system", compact=True)
            yield Label("temperature", classes="label")
            yield Entry(id="temperature", compact=True)
            yield Label("top-p", classes="label")
            yield Entry(id="top-p", compact=True)
        yield KeyBar()

    async def on_mount(self) -> None:
        before = self._latest
        if before is not None and before.run.absolute() == self._run.absolute():
            self._run = before.run  # the same run, by another path
        is_new = before is None or before.run != self._run
        session = self._new_session() if is_new else self._session
        self._fill_in()
        if is_new:
            if before is not None:
                await before.close()
            if starting := await asyncio.to_thread(self._shared.starting):
                await session.unload(f"{starting} is starting and needs memory, so the model is not loaded yet.")
            else:
                await session.begin()
        session.changed = self._note
        self._draw()
        if not is_new:
            await self._renew()

    def _fill_in(self) -> None:
        """Shows the unsent message and the settings before anything is waited for: what is typed meanwhile stays."""
        settings = self._session.settings
        for name, value in (
            ("message", self._session.unsent),
            ("system", settings.system),
            ("temperature", f"{settings.answers.temperature:g}"),
            ("top-p", f"{settings.answers.top_p:g}"),
        ):
            self.query_one(f"#{name}", Input).value = value

    async def _renew(self) -> None:
        """Loads the model again if its process ended, or if another one would answer now. While a training runs, only
        ctrl+r loads a model whose process ended: the training may need the memory.
        """
        session = self._session
        found = await asyncio.to_thread(readable_sources, self._run)
        loaded = None if session.loaded is None else Path(session.loaded.source).resolve()
        named = f"{self._run.name}/{found[0].relative_to(self._run)}" if found else ""
        news = ""
        if not found or session.state == "answering":
            pass
        elif session.source != self._run and not session.source.is_dir():
            news = f"{session.source} was deleted: {named} answers"
            session.source = self._run
        elif session.source == self._run and loaded not in (None, found[0].resolve()):
            news = f"the result of the run is now {named}"
        if session.state == "ended" and self._shared.training():
            return
        if news:
            self.notify(one_line(news), markup=False)
        if news or session.state == "ended":
            await session.begin()

    def on_unmount(self) -> None:
        self._session.changed = lambda: None

    @property
    def _session(self) -> ChatSession:
        session = self._latest
        assert session is not None
        return session

    @property
    def _latest(self) -> ChatSession | None:
        """The conversation that the interface has, perhaps with another run."""
        session = self._shared.chat
        assert session is None or isinstance(session, ChatSession)
        return session

    def _new_session(self) -> ChatSession:
        """A conversation with the run, in place of the current one, whose settings it takes. Nothing is loaded yet."""
        session = ChatSession(self._run, self._run, self._shared.environment, self._shared.training)
        if (before := self._latest) is not None:
            session.settings, session.last = before.settings, before.last
        self._shared.chat = session
        return session

    # ---- drawing

    def on_resize(self) -> None:
        self._note()

    def _note(self) -> None:
        self._new = True

    @work(exclusive=True, group="draw")
    @until_closed
    async def _draw(self) -> None:
        while True:
            if self._new or self._session.state == "loading":  # for how long
                self._new = False
                self._show()
            await asyncio.sleep(self._pause)

    def _show(self) -> None:
        session = self._session
        head = wrapped_parts((one_line(part) for part in self._head()), self.size.width - 2)
        for selector, text in (("#chat-head", head), ("#chat-problem", self._problem())):
            line = self.query_one(selector, Static)
            line.display = bool(text)
            if line.content != text:
                line.update(text)
        message = self.query_one("#message", Input)
        message.placeholder = HINTS[session.state]
        if session.returned:
            message.value, session.returned = f"{session.returned} {message.value}".rstrip(), ""
            message.cursor_position = len(message.value)
        waiting = [ShownTurn(session.waiting, waiting=True)] if session.waiting else []
        self.query_one(Transcript).show([*session.turns, *waiting], session.state)
        self.query_one("#chat-history").display = len(session.turns) + len(waiting) == 2
        if session.model != self._named:
            self._named = session.model
            self.query_one(TopBar).tell(str(from_here(run_of(session.model))))
        offered = session.state, bool(session.turns or waiting), session.settings.base
        if offered != self._offered:  # it rebuilds the footer
            self._offered = offered
            self.refresh_bindings()

    def _head(self) -> list[str]:
        session, loaded = self._session, self._session.loaded
        name = from_here(session.model)
        answers = "answers: tuned and base model" if session.settings.base else "answers: tuned model"
        if loaded is None:
            took = format_duration(time.monotonic() - session.loading_since)
            return [f"{name}: {f'loading, {took}' if session.state == 'loading' else 'not loaded'}", answers]
        measured = [] if session.measured is None else [f"{format_rate(session.measured)} measured"]
        memory = format_bytes(session.host) + (f" and {format_bytes(session.vram)} VRAM" if session.vram else "")
        return [
            f"{name} on the {WHERE[loaded.placement]}: {format_rate(loaded.expected)} expected",
            *([f"({loaded.state})"] if loaded.state else []),
            *measured,
            f"({loaded.reason})",
            *([f"process {memory}"] if session.host else []),
            answers,
        ]

    def _problem(self) -> str:
        session = self._session
        if session.state == "ended":
            again = " again; the conversation is kept" if session.turns else ""
            return f"{session.problem}\nctrl+r loads the model{again}."
        if session.problem or session.loaded is None:
            return session.problem
        if session.state == "idle" and session.settings.base and session.turns and not session.turns[-1].base_asked:
            return "ctrl+r asks both models again."
        return "" if session.loaded.templated else "The tokenizer has no chat template: the model continues your text."

    # ---- actions

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        session = self._latest
        if session is None:
            return action == "back"
        if action == "retry":
            return session.state == "ended" or (session.state == "idle" and bool(session.turns))
        if action == "edit":
            return bool(session.waiting) or (session.state == "idle" and bool(session.turns or session.last))
        if action == "base":
            return parameters[0] != session.settings.base
        if action in ("checkpoint", "place"):
            return session.state != "answering"
        return True

    @on(Input.Changed, "#message")
    def _keep(self, event: Input.Changed) -> None:
        self._session.unsent = event.value

    @on(Input.Submitted, "#message")
    def _submitted(self, event: Input.Submitted) -> None:
        said = event.value.strip()
        if not said:
            return
        if self._session.waiting:
            self.notify(WAITS)
            return
        if self._session.state == "ended" or (self._session.state == "answering" and self._session.turns):
            self.notify(HINTS[self._session.state])
            return
        if self._apply_settings():
            self._session.ask(said)
            event.input.clear()
            self._note()

    @on(Input.Submitted, "#system, #temperature, #top-p")
    def _to_message(self) -> None:
        self.query_one("#message").focus()

    def _apply_settings(self) -> bool:
        """Takes the settings of the next answer. Returns False if one is invalid, which then has the focus."""
        session = self._session
        session.settings.system = self.query_one("#system", Input).value.strip()
        for name in ("temperature", "top-p"):
            field = self.query_one(f"#{name}", Input)
            try:
                answers = replace(session.settings.answers, **{name.replace("-", "_"): float(field.value)})
                answers.check()
                session.settings.answers = answers
            except ValueError as error:
                reason = str(error) if isinstance(error, UserError) else f"{name} must be a number"
                self.notify(reason, severity="error")
                field.focus()
                return False
        return True

    @work
    @until_closed
    async def action_retry(self) -> None:
        if self._session.state == "ended":
            await self._session.begin()
        elif self._apply_settings():
            self._session.retry()
            self._note()

    def action_edit(self) -> None:
        message = self.query_one("#message", Input)
        if not message.value and (said := self._session.take_back() or self._session.last):
            message.value = said
            message.cursor_position = len(said)
            self._note()

    def action_base(self, answers: bool) -> None:
        self._session.settings.base = answers
        self._note()

    def action_reset(self) -> None:
        self.query_one("#message", Input).clear()
        self._session.reset()
        self.post_message(TakeBack(WAITS))
        self._note()

    @work
    @until_closed
    async def action_checkpoint(self) -> None:
        marks = await asyncio.to_thread(models_to_ask, self._run, self._shared.runs_folder)
        found = list(marks)
        lines = [PickLine(f"{from_here(path)}{f' ({mark})' if mark else ''}") for path, mark in marks.items()]
        answers = None if self._session.loaded is None else Path(self._session.loaded.source).resolve()
        current = next((index for index, path in enumerate(found) if path.resolve() == answers), 0)
        question = "Which model should answer? The conversation is kept."
        chosen = await ask(self, Pick(question, lines, current, "No run here has an exported model or a checkpoint."))
        if chosen is not None and found[chosen].resolve() != answers:
            self._session.source = found[chosen]
            await self._session.begin()

    @work
    @until_closed
    async def action_place(self) -> None:
        session = self._session
        kinds, speeds = list(PLACEMENTS), {} if session.loaded is None else session.loaded.speeds
        lines = [_placement_line(kind, speeds) for kind in kinds]
        question = "Run where? The model is loaded again, and the conversation is kept."
        chosen = await ask(self, Pick(question, lines, kinds.index(session.placement)))
        if chosen is not None and kinds[chosen] != session.placement:
            await session.begin(kinds[chosen])

    def action_scroll(self, pages: int) -> None:
        transcript = self.query_one(Transcript)
        transcript.scroll_relative(y=pages * transcript.size.height, animate=False)

    def action_back(self) -> None:
        if self._session.state == "answering":
            self._session.stop()
        else:
            self.dismiss(None)


def _placement_line(kind: str, speeds: Mapping[str, float]) -> PickLine:
    """`speeds`: of the placements with enough free memory; empty: unknown."""
    if kind in speeds:
        return PickLine(f"{kind:<9} {format_rate(speeds[kind])}, {PLACEMENTS[kind]}")
    if speeds and kind != "auto":
        return PickLine(f"{kind:<9} too little free memory, or no GPU", enabled=False)
    return PickLine(f"{kind:<9} {PLACEMENTS[kind]}")
