//! Tasks of contributors: the demonstration, and guests and Ceph clusters for manual tests and benchmarks.
#![forbid(unsafe_code)]

mod demo;

use anyhow::Result;
use clap::{Parser, Subcommand};
use end_to_end::ceph::{CEPH_USER, Ceph};
use std::path::PathBuf;
use std::time::Instant;
use vm::{GuestBuilder, GuestProgram};

#[derive(Parser)]
#[command(about = "Run the demonstration, guests, and Ceph clusters for manual tests")]
struct Command {
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand)]
enum Action {
    /// Serve two disks to a guest through both transports and measure them. At a terminal, the daemon and the guest run until Enter,
    /// otherwise for DEMO_SECONDS
    Demo,
    /// Start a Ceph cluster with two images, run a command with --conf, --id, --image and --peer-image, and stop the cluster
    Ceph {
        /// Command and its arguments
        #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
        command: Vec<String>,
    },
    /// Build the programs that run in guests. Without this, the first guest that needs them builds them
    Programs,
    /// Boot a guest with disks of running back ends, and run one script in it
    Boot {
        /// Socket of a virtio-blk disk; may be given several times
        #[arg(long, value_name = "SOCKET")]
        blk: Vec<PathBuf>,
        /// Socket of a virtio-scsi controller; may be given several times
        #[arg(long, value_name = "SOCKET")]
        scsi: Vec<PathBuf>,
        /// Number of request queues of each device
        #[arg(long, default_value_t = 1)]
        queues: u32,
        /// Number of virtual CPUs
        #[arg(long, default_value_t = 1)]
        cpus: u32,
        /// Additional argument for QEMU; may be given several times
        #[arg(long, value_name = "ARGUMENT", allow_hyphen_values = true)]
        qemu: Vec<String>,
        /// Shell script to run in the guest
        script: String,
    },
}

/// Runs a command in a cluster. Returns its exit status after the cluster has been removed.
fn in_cluster(command: &[String]) -> Result<i32> {
    let ceph = Ceph::start()?;
    for image in ["rbd/lunette", "rbd/peer"] {
        ceph.rbd(&["create", image, "--size", "512M"])?;
    }
    let status = std::process::Command::new(&command[0])
        .args(&command[1..])
        .arg("--conf")
        .arg(ceph.conf())
        .args(["--id", CEPH_USER])
        .args(["--image", "rbd/lunette", "--peer-image", "rbd/peer"])
        .status()?;
    Ok(status.code().unwrap_or(1))
}

fn main() -> Result<()> {
    vm::watch()?;
    match Command::parse().action {
        Action::Demo => demo::run(),
        Action::Programs => {
            for program in [GuestProgram::Agent, GuestProgram::Bench] {
                println!("{}", vm::guest_program(program)?.display());
            }
            Ok(())
        }
        Action::Ceph { command } => {
            let code = in_cluster(&command)?;
            std::process::exit(code)
        }
        Action::Boot {
            blk,
            scsi,
            queues,
            cpus,
            qemu,
            script,
        } => {
            let mut builder = GuestBuilder::new("boot")
                .cpus(cpus)
                .arguments(qemu.iter().map(String::as_str));
            for socket in &blk {
                builder = builder.vhost_user_blk(&std::path::absolute(socket)?, queues);
            }
            for socket in &scsi {
                builder = builder.vhost_user_scsi(&std::path::absolute(socket)?, queues);
            }
            let started = Instant::now();
            let mut guest = builder.boot()?;
            eprintln!("guest up after {:.1} s", started.elapsed().as_secs_f64());
            let output = guest.run(&script)?;
            print!("{}", output.stdout);
            eprint!("{}", output.stderr);
            // `exit` does not run destructors.
            drop(guest);
            std::process::exit(output.code)
        }
    }
}
