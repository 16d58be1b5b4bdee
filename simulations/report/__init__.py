"""The report: run log(s) -> one self-contained HTML page, readable on a phone and in the dark.

``summary`` parses the log, ``words`` writes its figures, ``statement`` says what they mean, ``charts`` chooses the
charts and ``svg`` draws them, ``tables`` holds the tables; ``run_page`` puts them together from the pieces of ``page``,
in the colours of ``style``. ``live`` serves that page while a run goes on; ``poster`` puts charts into a file of their
own. Start at ``run_page.write_report``.
"""

from simulations.report.run_page import write_report
from simulations.report.summary import load_run

__all__ = ["load_run", "write_report"]
