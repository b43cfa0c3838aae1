"""Charts as SVG: line charts with intervals, histograms and heat strips, for pages, reports and files.

Colours are CSS variables with fall-backs, set by presentation attributes, so that a page can override them and a strict
content security policy accepts the charts: ``--chart-1`` to ``--chart-6``, ``--chart-text``, ``--chart-grid``,
``--chart-heat`` and ``--chart-heat-negative``. The functions return ``Markup``: templates do not escape it again.
"""
