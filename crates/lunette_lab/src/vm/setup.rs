//! `lunette vm setup`.

use std::io::Write;

use clap::Args;
use cli_common::{Outcome, print_line};
use vm::setup::Setup;
use vm::{Accelerator, guest_directory};

use super::failed;

/// `lunette vm setup`
#[derive(Debug, Args)]
#[command(after_help = AFTER)]
pub struct SetupArguments {
    /// Download existing files again, to get the newest kernel
    #[arg(long)]
    again: bool,
}

const AFTER: &str = "\
Guests without --system boot Debian's cloud kernel and an initramfs with busybox, some tools of this machine, and
the agent for `lunette vm exec`. The packages are downloaded with apt-get and unpacked into
$XDG_DATA_HOME/lunette/guest, by default ~/.local/share/lunette/guest; LUNETTE_GUEST_DIR sets another folder. Nothing is installed, and
no privileges are needed.

Example:
    lunette vm setup && lunette vm run blk:1";

/// Downloads and unpacks the small system.
///
/// # Errors
/// A failed download or build.
pub fn run(arguments: &SetupArguments) -> Outcome {
    vm::watch().map_err(failed)?;
    let mut setup = Setup {
        report: &mut |line| print_line(&line),
        again: arguments.again,
    };
    let system = setup.run().map_err(failed)?;
    let accelerator = Accelerator::detect().map_err(failed)?;
    let mut stdout = cli_common::stdout();
    writeln!(stdout, "folder:      {}", guest_directory().display())?;
    writeln!(stdout, "kernel:      {}", system.kernel.display())?;
    writeln!(stdout, "initramfs:   {}", system.initramfs.display())?;
    writeln!(stdout, "accelerator: {}", accelerator.word())?;
    Ok(())
}
