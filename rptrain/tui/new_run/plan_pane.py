"""The pane of New run with the plan and the changes that it proposes."""

from textual.app import ComposeResult
from textual.containers import VerticalScroll

from rptrain.tui.new_run.advice_list import AdviceList
from rptrain.tui.new_run.plan_panel import PlanPanel
from rptrain.tui.new_run.planning import Planned

Subject = tuple[str, str]  # a model and its data


class PlanPane(VerticalScroll):
    """The plan that was made last. `subject`: the model and the data that it is about."""

    def __init__(self) -> None:
        super().__init__(id="plan")
        self.subject: Subject = ("", "")
        self._text = ""  # of the config, if its plan is shown and fits

    def compose(self) -> ComposeResult:
        yield PlanPanel()
        yield AdviceList()

    @property
    def panel(self) -> PlanPanel:
        return self.query_one(PlanPanel)

    @property
    def advice(self) -> AdviceList:
        return self.query_one(AdviceList)

    @property
    def is_done(self) -> bool:
        """Whether the plan of the settings on the screen is shown, with or without changes that it proposes."""
        return self.panel.planned is not None and not self.panel.busy and not self.panel.problem

    def fits(self, text: str) -> bool:
        """Whether it is the plan of a config with this text, and the run can start."""
        return self._text == text

    def expect(self, subject: Subject) -> None:
        """Another plan will come: the one that is shown is marked, or removed if it is of another model."""
        self.panel.busy = True
        if subject[0] != self.subject[0]:
            self.panel.planned = None
            self.advice.propose(None)

    def show(self, planned: Planned, text: str, subject: Subject) -> None:
        panel = self.panel
        panel.problem, panel.planned, panel.busy = "", planned, False
        self._text, self.subject = text if planned.fits else "", subject
        self.advice.propose(planned)

    def refuse(self, problem: str) -> None:
        """Shows why planning failed."""
        panel = self.panel
        panel.problem, panel.busy, self._text = problem, False, ""
        panel.note = ""  # it may be about a name before
        self.advice.propose(None)

    def expire(self) -> None:
        """The plan has to be made again, because a run that was started changes what is free."""
        self._text, self.panel.busy = "", True
