"""The first samples of a draft, for the screens that show them."""

from textual.content import Content

from rptrain.tui.new_run import planning
from rptrain.tui.new_run.sample_text import preview_text
from rptrain.tui.services.draft import Draft
from rptrain.tui.services.helper import Helper, HelperError
from rptrain.utils.errors import UserError
from rptrain.utils.text import as_message


async def first_samples(helper: Helper, draft: Draft) -> Content:
    """The first samples of a draft's first data set, or why there are none."""
    try:
        return preview_text(await helper.call(planning.preview, draft.path, draft.text))
    except (UserError, HelperError) as error:
        return Content.styled(as_message(str(error)), "$error")
