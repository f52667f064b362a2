//! Guests for demonstrations and tests.
