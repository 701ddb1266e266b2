"""The terminal interface. Only `rptrain.tui.app` and what it imports need Textual; a run trains without any of it."""
