"""The ops that are not ATen's: functions of ours that do the work of several calls, as one op of the graph."""

from placewise.graph_capture.fused_updates import FusedUpdate
from placewise.graph_capture.recurrent_layers import Layers
from placewise.graph_capture.whole_passes import Pass

OwnOp = Pass | Layers | FusedUpdate
