"""The Doctor screen: the checks of this machine."""
