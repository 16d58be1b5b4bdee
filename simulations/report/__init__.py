"""The report: run log(s) -> one self-contained HTML page, readable on a phone and in the dark.

``summary`` parses the log, ``words`` writes its figures, ``charts`` chooses the charts and ``svg`` draws them, ``page``
puts everything together in the colours of ``style``; ``poster`` puts charts into a file of their own. Start at
``page.write_report``.
"""

from simulations.report.page import write_report
from simulations.report.summary import load_run

__all__ = ["load_run", "write_report"]
