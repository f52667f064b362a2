//! Guests that run for a user, until they power off or are stopped: `lunette vm run` and its companions.
//!
//! - One process, the **supervisor**, starts a daemon and QEMU and waits for their ends (`supervisor.rs`). It alone speaks with the
//!   guest's ports: it shares the agent's port between clients (`agent_port.rs`) and the console (`console.rs`).
//! - A second one, the **watcher**, waits for the supervisor's end, however it comes, and then kills what is left and removes the
//!   guest's folder (`watcher.rs`).
//! - The guest's **folder** lies below `$XDG_RUNTIME_DIR/lunette/vm` and holds sockets, logs and its state (`registry.rs`).
//! - A network card's **tap** is made here and goes to QEMU as descriptors (`network.rs`).
//! - Every other command is a client of those sockets (`client.rs`).

mod agent_port;
mod client;
mod console;
mod network;
mod outbox;
mod registry;
mod supervisor;
mod watcher;

pub use client::{Ended, ExecInput, exec};
pub use console::{Attached, attach};
pub use network::{Tap, TapOptions};
pub use registry::{Claim, Phase, Place, Plugged, Registry, State};
pub use supervisor::{
    AGENT_SOCKET, CONSOLE_SOCKET, Daemon as OwnDaemon, Expect, GuestEnd, MONITOR_SOCKET, Program,
    QMP_SOCKET, Recipe, Supervisor, ports, qemu_value,
};
pub use watcher::{Watcher, terminate, watch_parent};
