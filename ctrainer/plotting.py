"""The picture of a run under the name that scripts have for it."""

from ctrainer.display.plotting import plot as plot
