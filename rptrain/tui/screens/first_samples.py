"""The first samples of a draft, for the screens that show them."""

from textual.content import Content

from rptrain.tui.services import heavy
from rptrain.tui.services.draft import Draft
from rptrain.tui.services.helper import Helper, HelperError
from rptrain.tui.widgets.sample_text import preview_text
from rptrain.utils.errors import UserError
from rptrain.utils.text import as_message


async def first_samples(helper: Helper, draft: Draft) -> Content:
    """The first samples of a draft's first data set, or why there are none."""
    try:
        return preview_text(await helper.call(heavy.preview, draft.path, draft.text))
    except (UserError, HelperError) as error:
        return Content.styled(as_message(str(error)), "$error")
