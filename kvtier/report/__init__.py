"""What a replay leaves for its reader: table, verdict, results.json and plots."""

from kvtier.report.figures import Group, Spread, group_runs
from kvtier.report.files import prepare_folder, write_atomically
from kvtier.report.plots import write_plots
from kvtier.report.results import describe_config, describe_trace, encode_results
from kvtier.report.table import print_report
from kvtier.report.verdict import verdict

__all__ = [
    "Group",
    "Spread",
    "describe_config",
    "describe_trace",
    "encode_results",
    "group_runs",
    "prepare_folder",
    "print_report",
    "verdict",
    "write_atomically",
    "write_plots",
]
