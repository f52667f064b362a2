//! The `lunette` command.
fn main() {}
