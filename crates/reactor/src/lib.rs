//! One worker's turn.
