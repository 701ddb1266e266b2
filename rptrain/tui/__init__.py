"""The terminal interface. Only `rptrain.tui.app` and its imports need Textual; training does not."""
