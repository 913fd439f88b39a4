"""The page of a run: report.html with its plots."""
