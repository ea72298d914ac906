"""Run a function in several processes that are restarted when they fail: `launch`, `Restarts`."""

from footplate.launch.policy import Restarts as Restarts
from footplate.launch.supervisor import launch as launch
