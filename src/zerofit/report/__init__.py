"""The report page of a run, report.html, with its charts."""
