"""The texts that a chat template puts around messages, and the Go template that puts the same ones.

Ollama does not run chat templates: a model has a Go template, which it applies to every question with its answer. In
general one does not follow from the other. So the texts are read off conversations that the chat template renders, and
the Go template is written only if it gives the same text for all of PROBES.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

System, User, Answer = "Sys\ue000tem", "Ques\ue001tion", "Ans\ue002wer"  # private characters: templates have none
AGAIN = "Ques\ue003tion"
Conversation = Sequence[tuple[str, str]]  # roles and texts
PROBES: tuple[Conversation, ...] = (
    (("user", User),),
    (("system", System), ("user", User)),
    (("user", User), ("assistant", Answer), ("user", AGAIN)),
    (("system", System), ("user", User), ("assistant", Answer), ("user", AGAIN)),
)
MARKS = ("{{", "}}", '"""')  # of Go templates, and of the Modelfile around them


@dataclass(frozen=True)
class Turns:
    """The texts around messages. `inside`: the system text is a part of the first question, after `user`.

    `space`: white space with which answers begin after `assistant`. The model generates it, so Ollama has it in them.
    """

    system: str  # before a system text
    after_system: str
    user: str  # before a question
    assistant: str  # between a question and its answer
    end: str  # after an answer
    inside: bool = False
    space: str = ""
    default_system: str = ""  # the system text that the template writes if there is none

    def render(self, conversation: Conversation) -> str:
        """A conversation with the generation prompt, as Ollama renders it with the Go template."""
        texts, system = list[str](), self.default_system
        for role, text in conversation:
            if role == "system":
                system = text
            elif role == "user":
                before = self.system + system + self.after_system if system else ""
                texts += [self.user, before] if self.inside else [before, self.user]
                texts += [text, self.assistant]
                system = ""
            else:
                texts += [self.space, text, self.end]
        return "".join(texts)

    def go_template(self) -> str:
        system = f"{{{{ if .System }}}}{self.system}{{{{ .System }}}}{self.after_system}{{{{ end }}}}"
        before = self.user + system if self.inside else system + self.user
        return f"{before}{{{{ .Prompt }}}}{self.assistant}{{{{ .Response }}}}{self.end}"


def find_turns(render: Callable[[Sequence[Conversation]], list[str]], bos: str) -> Turns | None:
    """The texts that a chat template puts around messages; None if it does more than that.

    `render` renders conversations with the generation prompt, and may raise ValueError for a system text. `bos`: the
    text of a token that Ollama puts before the conversation itself, which is therefore left out; empty: it puts none.
    """
    try:
        rendered = render(PROBES)
    except ValueError:  # of a template without system texts, or one that needs other messages
        return None
    plain, with_system, chat, _ = (text.removeprefix(bos) for text in rendered)
    found = _read_off(plain, with_system, chat)
    if found is None or any(mark in text for mark in MARKS for text in rendered):
        return None
    same = all(found.render(probe) == text.removeprefix(bos) for probe, text in zip(PROBES, rendered, strict=True))
    return found if same else None


def _read_off(plain: str, with_system: str, chat: str) -> Turns | None:
    """The texts around the messages of three of PROBES."""
    user, question, assistant = plain.partition(User)
    space = chat.partition(User)[2].partition(Answer)[0].removeprefix(assistant)
    system, text, rest = with_system.partition(System)
    between, again, _ = rest.partition(User)
    end = chat.partition(Answer)[2].partition(AGAIN)[0]
    if not (question and text and again) or space.strip():
        return None
    if system == user:
        return Turns("", between, user, assistant, end.removesuffix(user), inside=True, space=space)
    if between.endswith(user):
        return Turns(system, between.removesuffix(user), user, assistant, end.removesuffix(user), space=space)
    if user.startswith(system) and user.endswith(between):  # what begins a later question is taken as a part of `end`
        default = user.removeprefix(system).removesuffix(between)
        return Turns(system, between, "", assistant, end, space=space, default_system=default)
    return None
