"""For all tests: a machine that is busy makes none of them fail by its clock."""

from hypothesis import settings

settings.register_profile("calm", deadline=None)
settings.load_profile("calm")
