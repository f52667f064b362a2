//! Builds Debian packages of the tested programs.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::Scratch;
use anyhow::{Context, Result, ensure};
use vm::{GuestProgram, Profile, guest_program, lunette_program};

/// Runs a packaging tool.
pub fn run(command: &mut Command) -> Result<Output> {
    let ran = command.output();
    ran.with_context(|| format!("cannot run {command:?}; hint: apt-get install dpkg-dev lintian"))
}

/// Runs a command that must succeed and returns its standard output.
pub fn succeeds(command: &mut Command) -> Result<String> {
    let ran = run(command)?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (output_text, wrong) = (text(&ran.stdout), text(&ran.stderr));
    ensure!(ran.status.success(), "{command:?}: {output_text}{wrong}");
    Ok(output_text)
}

/// Creates a target directory with the programs of this build. The packages have the same contents for every profile.
pub fn built(scratch: &Scratch) -> Result<PathBuf> {
    let target = scratch.file("target");
    let (release, guests) = (
        target.join("release"),
        target.join("guest-agent/x86_64-unknown-linux-gnu/release"),
    );
    std::fs::create_dir_all(&release)?;
    std::fs::create_dir_all(&guests)?;
    let program = lunette_program(Profile::Dev)?;
    for name in ["lunette", "lunette-lab"] {
        // Stripped, because packing debug information takes long.
        let place = release.join(name);
        succeeds(
            Command::new("strip")
                .arg("-o")
                .arg(&place)
                .arg(program.with_file_name(name)),
        )?;
        std::fs::set_permissions(&place, std::fs::Permissions::from_mode(0o755))?;
    }
    for program in [GuestProgram::Agent, GuestProgram::Bench] {
        std::fs::copy(guest_program(program)?, guests.join(program.name()))?;
    }
    Ok(target)
}

/// Finds the packages `lunette` and `lunette-lab` of a release.
fn released(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(folder).with_context(|| folder.display().to_string())?;
    let files: Vec<PathBuf> = entries
        .map(|entry| Ok(entry?.path()))
        .collect::<Result<_>>()?;
    let find = |package: &str| {
        let found = files.iter().find(|file| {
            let name = file.file_name().unwrap_or_default().to_string_lossy();
            name.starts_with(package) && name.ends_with(".deb")
        });
        found.cloned().with_context(|| {
            let folder = folder.display();
            format!("LUNETTE_PACKAGES: no {package}*.deb in {folder}")
        })
    };
    Ok(vec![find("lunette_")?, find("lunette-lab_")?])
}

/// Builds the packages `lunette` and `lunette-lab`, in this order. With `$LUNETTE_PACKAGES`, returns those in that folder.
pub fn packages(target: &Path, out: &Path, revision: &str) -> Result<Vec<PathBuf>> {
    if let Some(folder) = std::env::var_os("LUNETTE_PACKAGES") {
        return released(Path::new(&folder));
    }
    let script = vm::workspace().join("scripts/deb");
    let mut command = Command::new(script);
    command
        .arg(target)
        .arg(out)
        .arg(revision)
        .env("SOURCE_DATE_EPOCH", "1795000000")
        // Faster than xz
        .env("DEB_COMPRESSION", "gzip")
        .env("DEB_LEVEL", "1");
    let made = succeeds(&mut command)?;
    Ok(made.lines().map(PathBuf::from).collect())
}
