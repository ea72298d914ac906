"""The metrics that `self.log` collects.

metric_log.py             the metrics of one loop: collect, report by step, reduce by epoch
entry.py                  one logged name, and the values that are reported
host_values.py            numbers on devices read in one transfer
logging_checks.py         checks of what a user passes to `self.log`
torchmetrics_objects.py   torchmetrics objects whose states differ between ranks
"""

from footplate.training.metrics.entry import Values as Values
from footplate.training.metrics.host_values import to_floats as to_floats
from footplate.training.metrics.logical_log import LogicalMetricLog as LogicalMetricLog
from footplate.training.metrics.metric_log import READ_AFTER as READ_AFTER
from footplate.training.metrics.metric_log import MetricLog as MetricLog
