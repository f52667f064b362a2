//! Configuration, object model, control socket.
