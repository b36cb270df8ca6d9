"""A model of a device that is not at hand: predicted times, and how far they are from reported ones."""
