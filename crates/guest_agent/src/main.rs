//! Program in a lab guest: workloads with verified content, probes for errors, and the agent that starts them.
//!
//! Linked statically, because the guest is an initramfs with little more than busybox. Each subcommand prints one JSON object on stdout.
//! Exit codes: 1 if an I/O failed or data was wrong, 2 for invalid arguments.
#![forbid(unsafe_code)]

mod agent;
mod args;
mod block_file;
mod channel;
mod load;
mod pattern;
mod probe;
mod random;
mod summary;
mod verify;

use args::Args;
use std::process::ExitCode;

const USAGE: &str = "guest-agent SUBCOMMAND --file PATH [--OPTION VALUE]...
  load   --rw read|write|randread|randwrite|randrw  --bs 4096 --depth 1 --runtime 3 [--size BYTES] [--mix 50] [--buffered]
  fill   --seed 1 --writes 1000 --bs 4096 --depth 4 [--size BYTES] [--buffered]   random writes with checksummed content
  check  the same options as fill: reads everything back and compares
  soak   --seed 1 --runtime 5 --bs 4096 --depth 4 [--size BYTES]                  random writes, each verified later
         [--pause 0]      milliseconds after each I/O of a thread
         [--while FILE]   creates the file after the first I/O, ends when it is removed
  probe  --op read|write|flush --offset 0 --length 512 [--buffered]               one I/O; prints bytes or errno
  zeroes --offset 0 --length BYTES                                               checks that the range reads as zeroes
  agent  --file TTY                                                              runs commands of a test's host
  channel                                                                        runs commands of `lunette vm exec`";

fn main() -> ExitCode {
    let mut words = std::env::args().skip(1);
    let subcommand = words.next().unwrap_or_default();
    let outcome = Args::parse(words).and_then(|args| match subcommand.as_str() {
        "load" => load::run(&args),
        "fill" => verify::fill(&args),
        "check" => verify::check(&args),
        "soak" => verify::soak(&args),
        "probe" => probe::one(&args),
        "zeroes" => probe::zeroes(&args),
        "agent" => agent::serve(&args),
        "channel" => channel::serve(&args),
        _ => Err(format!("unknown subcommand {subcommand:?}\n{USAGE}")),
    });
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(problem) => {
            eprintln!("guest-agent: {problem}");
            ExitCode::from(2)
        }
    }
}
