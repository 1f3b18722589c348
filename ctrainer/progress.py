"""The display's callback under the name that scripts and pickles have for it."""

from ctrainer.display.progress import ProgressCallback as ProgressCallback
