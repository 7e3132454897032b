"""The report of a study: tables, figures, and one page that holds them all."""

from crosscurrent.experiments.report.page import write_report

__all__ = ["write_report"]
