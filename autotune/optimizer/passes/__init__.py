"""The passes that ship with the optimizer. A user's own is any object with a name and `propose` (`state.Pass`)."""
