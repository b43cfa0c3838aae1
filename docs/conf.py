"""Settings of Sphinx; docs/build.py runs it."""

project = "Lightning"
author = copyright = "The Lightning authors"  # noqa: A001 the name that Sphinx reads
extensions = ["myst_parser", "sphinx_copybutton"]
root_doc = "index"
myst_enable_extensions = ["html_image"]
myst_heading_anchors = 6  # as on GitHub
suppress_warnings = ["misc.highlighting_failure"]  # abridged JSON, for example

smartquotes_action = "qe"  # not dashes: options begin with two

html_theme = "furo"
html_title = "Lightning"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_use_index = False
html_copy_source = False  # the Markdown twins are complete
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}
copybutton_selector = "div.highlight:not(.highlight-text) pre"
