"""What a replay leaves for its reader: table, verdict, results.json and plots."""

from kvtier.report.figures import Group, Spread, group_runs
from kvtier.report.files import check_folder, write_results
from kvtier.report.plots import write_plots
from kvtier.report.results import describe_config, describe_trace, encode_results
from kvtier.report.table import render_report
from kvtier.report.verdict import verdict

__all__ = [
    "Group",
    "Spread",
    "check_folder",
    "describe_config",
    "describe_trace",
    "encode_results",
    "group_runs",
    "render_report",
    "verdict",
    "write_plots",
    "write_results",
]
