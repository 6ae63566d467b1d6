//! An in-process network in virtual time, for tests.
