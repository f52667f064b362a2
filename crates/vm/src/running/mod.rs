//! Guests that run for a user until they power off or are stopped: `lunette vm run` and related commands.
//!
//! - The **supervisor** process starts a daemon and QEMU and waits for their ends (`supervisor.rs`). Only the supervisor accesses the
//!   guest's ports: it shares the agent's port (`agent_port.rs`) and the console (`console.rs`) between clients.
//! - The **watcher** process waits for any end of the supervisor, then kills remaining processes and removes the guest's folder
//!   (`watcher.rs`).
//! - The guest's **folder** is below `$XDG_RUNTIME_DIR/lunette/vm` and contains sockets, logs and state (`registry.rs`).
//! - The **tap** of a network card is created here and passed to QEMU as descriptors (`network.rs`).
//! - A guest **migrates** to a second QEMU of its supervisor, over a socket in the folder (`migration.rs`).
//! - Every other command is a client of these sockets (`client.rs`).

mod agent_port;
mod client;
mod console;
mod migration;
mod network;
mod other_daemon;
mod outbox;
mod registry;
mod supervisor;
mod watcher;

pub use agent_port::IS_MIGRATING;
pub use client::{CommandEnd, ExecInput, exec};
pub use console::{ConsoleEnd, attach};
pub use migration::{
    ExportStops, Migrated, MigrationOptions, MigrationProgress, SECONDS_MAX, migrate,
};
pub use network::{Tap, TapOptions, card_properties};
pub use registry::{Claim, Phase, Plugged, Registry, RuntimeFolder, State};
pub use supervisor::{
    AGENT_SOCKET, CONSOLE_SOCKET, Daemon as OwnDaemon, GuestEnd, MONITOR_SOCKET, Program,
    QMP_SOCKET, Readiness, Recipe, Supervisor, command_socket, ports, qemu_value,
};
pub use watcher::{Watcher, terminate, watch_parent};
