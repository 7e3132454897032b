"""One text seen through a T2MLR model's recurrence: measured, drawn, and shown on a page."""

from crosscurrent.experiments.inspect.measure import Inspection, inspect_text
from crosscurrent.experiments.inspect.page import write_page

__all__ = ["Inspection", "inspect_text", "write_page"]
