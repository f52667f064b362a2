//! Command line of `lunette image`.

use std::path::PathBuf;

use bdev::{BackingFormat, NamedFiles};
use clap::{Args, Subcommand, ValueEnum};

/// `lunette image`
#[derive(Debug, Args)]
#[command(after_help = AFTER)]
pub struct ImageArguments {
    /// Subcommand
    #[command(subcommand)]
    pub action: Action,
}

const AFTER: &str = "\
Images have the format qcow2 of QEMU. Raw files, block devices, logical units, RBD images and NBD exports are raw disks. A logical unit has the form
iscsi://HOST[:PORT]/TARGET/LUN. An RBD image has the form rbd:POOL/IMAGE[@SNAPSHOT][:id=USER][:conf=FILE]. An NBD export has the form
nbd://HOST[:PORT]/EXPORT or nbd+unix:///EXPORT?socket=PATH. All commands except create and
convert refuse files that another process, such as QEMU, serves or has open for writing. A logical unit has no such lock.

A guest controls the content of its disk, so content alone never determines the format. Without a format option, a file is
qcow2 if it has that signature and its name ends in .qcow2, and raw if it has no image signature; all other files are refused.
An image may name other files. Only those in its own folder are opened, unless --named-files any is given.

Examples:
    lunette image create vm.qcow2 20G
    lunette image create overlay.qcow2 --backing vm.qcow2 --backing-format qcow2
    lunette image check vm.qcow2 --repair leaks
    lunette image commit overlay.qcow2
    lunette image snapshot vm.qcow2 --create before-upgrade
    lunette image rebase overlay.qcow2 --backing other.qcow2 --backing-format qcow2
    lunette image convert vm.qcow2 vm.raw --to raw
    lunette image convert vm.qcow2 iscsi://store/iqn.2026-11.org.example:vm/0 --to raw
    lunette serve --disk d0=image:vm.qcow2 --vhost-blk d0:/run/d0.sock";

/// Actions of `lunette image`.
#[derive(Debug, Subcommand)]
pub enum Action {
    /// Create an empty image
    Create(CreateArguments),
    /// Show the properties of an image: size, clusters, backing images, snapshots
    Info(InfoArguments),
    /// Check an image. Exit code 0: no faults, 1: an error, 2: damage, 3: only leaked clusters, 63: a format that has no check
    Check {
        /// Path of the image
        #[arg(value_name = "PATH")]
        path: PathBuf,
        /// Format of the image: qcow2; raw is refused
        #[arg(long, short = 'f', value_name = "FORMAT")]
        format: Option<Format>,
        /// Repair leaked clusters, or everything that can be repaired
        #[arg(long, short = 'r', value_name = "WHAT")]
        repair: Option<RepairWhat>,
        /// Print nothing but errors
        #[arg(long, short)]
        quiet: bool,
        #[command(flatten)]
        output: OutputArguments,
    },
    /// Resize the disk in an image or a raw file
    Resize(ResizeArguments),
    /// Show which parts of a disk have data
    Map {
        /// Image, raw file, block device, logical unit, RBD image or NBD export
        #[arg(value_name = "PATH")]
        path: PathBuf,
        /// Its format [default: qcow2 if name and content agree, raw if it has no signature]
        #[arg(long, short = 'f', value_name = "FORMAT")]
        format: Option<Format>,
        #[command(flatten)]
        named: NamedFilesArgument,
        #[command(flatten)]
        output: OutputArguments,
    },
    /// Copy a disk into a new file of another format, or over an existing disk; holes and zeroes take no space
    Convert(ConvertArguments),
    /// Write an image's data into its backing image. The image itself is unchanged
    Commit {
        /// Path of the image
        #[arg(value_name = "PATH")]
        path: PathBuf,
        /// Format of the image: qcow2; raw is refused
        #[arg(long, short = 'f', value_name = "FORMAT")]
        format: Option<Format>,
        #[command(flatten)]
        named: NamedFilesArgument,
        /// Print nothing but errors
        #[arg(long, short)]
        quiet: bool,
    },
    /// List, create, apply or remove the internal snapshots of an image
    Snapshot(SnapshotArguments),
    /// Change or remove the backing image. The content stays the same
    Rebase(RebaseArguments),
    /// Compare the content of two disks. Exit code 0: equal, 1: different, 2: an error
    Compare(CompareArguments),
}

/// Rule for files that images may name.
#[derive(Clone, Copy, Debug, Args)]
pub struct NamedFilesArgument {
    /// Backing images and data files that may be opened because an image names them: any, folder (files in the folder of the image that
    /// names them) or none
    #[arg(long = "named-files", value_name = "WHICH", default_value = "folder", value_parser = named_files)]
    pub files: NamedFiles,
}

fn named_files(word: &str) -> Result<NamedFiles, String> {
    let mut words = NamedFiles::WORDS.into_iter();
    let found = words.find(|(known, _)| *known == word);
    let found = found.map(|(_, value)| value);
    found.ok_or_else(|| "expected any, folder or none".to_owned())
}

/// Output format of a command.
#[derive(Clone, Copy, Debug, Args)]
pub struct OutputArguments {
    /// Print JSON, with the fields of qemu-img
    #[arg(long)]
    json: bool,
    /// Output format, as for qemu-img
    #[arg(long, value_name = "FORMAT", conflicts_with = "json")]
    output: Option<Output>,
}

impl OutputArguments {
    pub fn is_json(self) -> bool {
        self.json || self.output == Some(Output::Json)
    }
}

/// Output formats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// Text.
    Human,
    /// JSON.
    Json,
}

/// `lunette image info`
#[derive(Debug, Args)]
pub struct InfoArguments {
    /// Path of the image
    #[arg(value_name = "PATH")]
    pub path: PathBuf,
    /// Format of the image [default: detected from its content, without opening other files]
    #[arg(long, short = 'f', value_name = "FORMAT")]
    pub format: Option<Format>,
    /// Include the backing images
    #[arg(long, visible_alias = "backing-chain")]
    pub chain: bool,
    #[command(flatten)]
    pub named: NamedFilesArgument,
    #[command(flatten)]
    pub output: OutputArguments,
}

/// `lunette image resize`
#[derive(Debug, Args)]
pub struct ResizeArguments {
    /// Path of the image or raw file
    #[arg(value_name = "PATH")]
    pub path: PathBuf,
    /// New size in bytes, or with K, M, G, T (powers of 1024); +SIZE and -SIZE are relative to the present size
    #[arg(value_name = "SIZE", allow_hyphen_values = true)]
    pub size: String,
    /// Its format [default: qcow2 if name and content agree, raw if it has no signature]
    #[arg(long, short = 'f', value_name = "FORMAT")]
    pub format: Option<Format>,
    #[command(flatten)]
    pub named: NamedFilesArgument,
    /// Shrink the disk; data beyond its new end is lost
    #[arg(long)]
    pub shrink: bool,
    /// Print nothing but errors
    #[arg(long, short)]
    pub quiet: bool,
}

/// `lunette image compare`
#[derive(Debug, Args)]
pub struct CompareArguments {
    /// Image, raw file, block device, logical unit, RBD image or NBD export to compare
    #[arg(value_name = "PATH")]
    pub one: PathBuf,
    /// Image, raw file, block device, logical unit, RBD image or NBD export to compare with
    #[arg(value_name = "PATH")]
    pub other: PathBuf,
    /// Format of the first disk [default: qcow2 if name and content agree, raw if it has no signature]
    #[arg(long, short = 'f', value_name = "FORMAT")]
    pub format: Option<Format>,
    /// Format of the second disk [default: qcow2 if name and content agree, raw if it has no signature]
    #[arg(long, short = 'F', value_name = "FORMAT")]
    pub other_format: Option<Format>,
    #[command(flatten)]
    pub named: NamedFilesArgument,
    /// Report disks of different sizes as different. Without this option, the rest of the larger disk must read as zeroes
    #[arg(long, short)]
    pub strict: bool,
    /// Show the progress. This is the default on a terminal
    #[arg(long, short = 'p', conflicts_with = "quiet")]
    pub progress: bool,
    /// Print nothing but differences and errors
    #[arg(long, short)]
    pub quiet: bool,
}

/// `lunette image create`
#[derive(Debug, Args)]
pub struct CreateArguments {
    /// Path of the new image, which must not exist
    #[arg(value_name = "PATH")]
    pub path: PathBuf,
    /// Size of the disk in bytes, or with K, M, G, T (powers of 1024) [default: the size of the backing image]
    #[arg(value_name = "SIZE")]
    pub size: Option<String>,
    /// Format of the new file. raw creates an empty file of this size and allows no other options
    #[arg(long, short = 'f', value_name = "FORMAT", default_value = "qcow2")]
    pub format: Format,
    /// Backing image, which provides the data that the new image does not have. A relative path is relative to the new image
    #[arg(long, short = 'b', value_name = "PATH")]
    pub backing: Option<String>,
    /// Format of the backing image, stored in the new image [default: qcow2 if name and content agree, raw if it has no signature]
    #[arg(long, short = 'F', value_name = "FORMAT", requires = "backing")]
    pub backing_format: Option<Format>,
    #[command(flatten)]
    pub named: NamedFilesArgument,
    /// Size of a cluster: a power of two, 512 to 2M
    #[arg(long, value_name = "SIZE", default_value = "64K")]
    pub cluster_size: String,
    /// Allocate in subclusters of a 32nd of a cluster. Clusters must have 16K or more. QEMU must be 5.2 or newer
    #[arg(long)]
    pub extended_l2: bool,
    /// External data file for the data, so that the image has only metadata. A relative path is relative to the new image. The file must
    /// not exist, unless it is a block device
    #[arg(long, value_name = "PATH")]
    pub data_file: Option<String>,
    /// Make the data file a valid raw disk, which other programs may read and write while the image is not in use
    #[arg(long, requires = "data_file", conflicts_with = "backing")]
    pub data_file_raw: bool,
    /// Print nothing but errors
    #[arg(long, short)]
    pub quiet: bool,
}

/// `lunette image snapshot`
#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("change").args(["create", "apply", "delete"]).conflicts_with_all(["json", "output"]))]
pub struct SnapshotArguments {
    /// Path of the image
    #[arg(value_name = "PATH")]
    pub path: PathBuf,
    /// Take a snapshot with this name
    #[arg(long, short, value_name = "NAME")]
    pub create: Option<String>,
    /// Restore the disk from this snapshot; its present content is lost
    #[arg(long, short, value_name = "NAME")]
    pub apply: Option<String>,
    /// Remove this snapshot
    #[arg(long, short, value_name = "NAME")]
    pub delete: Option<String>,
    /// List the snapshots. This is the default
    #[arg(long, short, conflicts_with = "change")]
    pub list: bool,
    /// Format of the image: qcow2; raw is refused
    #[arg(long, short = 'f', value_name = "FORMAT")]
    pub format: Option<Format>,
    /// Print nothing but errors
    #[arg(long, short)]
    pub quiet: bool,
    #[command(flatten)]
    pub output: OutputArguments,
}

/// `lunette image rebase`
#[derive(Debug, Args)]
pub struct RebaseArguments {
    /// Path of the image
    #[arg(value_name = "PATH")]
    pub path: PathBuf,
    /// New backing image. A relative path is relative to the image
    #[arg(
        long,
        short = 'b',
        value_name = "PATH",
        required_unless_present = "no_backing"
    )]
    pub backing: Option<String>,
    /// Format of the backing image, stored in the image [default: qcow2 if name and content agree, raw if it has no signature]
    #[arg(long, short = 'F', value_name = "FORMAT", requires = "backing")]
    pub backing_format: Option<Format>,
    /// Format of PATH: qcow2; raw is refused
    #[arg(long, short = 'f', value_name = "FORMAT")]
    pub format: Option<Format>,
    #[command(flatten)]
    pub named: NamedFilesArgument,
    /// Remove the backing image
    #[arg(long, conflicts_with = "backing")]
    pub no_backing: bool,
    /// Change only the name of the backing image, for example after the file was moved. Unallocated clusters then read from the new
    /// backing image
    #[arg(long = "unsafe", short = 'u')]
    pub name_only: bool,
    /// Print nothing but errors
    #[arg(long, short)]
    pub quiet: bool,
}

/// `lunette image convert`
#[derive(Debug, Args)]
pub struct ConvertArguments {
    /// Image, raw file, block device, logical unit, RBD image or NBD export to copy
    #[arg(value_name = "SOURCE")]
    pub source: PathBuf,
    /// Destination: a new file, which must not exist without -n, or a block device, logical unit, RBD image or NBD export, which is overwritten
    #[arg(value_name = "DESTINATION")]
    pub destination: PathBuf,
    /// Format of the source [default: qcow2 if name and content agree, raw if it has no signature]
    #[arg(long, short = 'f', value_name = "FORMAT")]
    pub from: Option<Format>,
    #[command(flatten)]
    pub named: NamedFilesArgument,
    /// Format of the destination
    #[arg(long, short = 'O', value_name = "FORMAT")]
    pub to: Format,
    /// Write into an existing destination and keep its size
    #[arg(long, short = 'n')]
    pub existing: bool,
    /// Size of a cluster of a new image: a power of two, 512 to 2M
    #[arg(long, value_name = "SIZE", default_value = "64K")]
    pub cluster_size: String,
    /// Show the progress. This is the default on a terminal
    #[arg(long, short = 'p', conflicts_with = "quiet")]
    pub progress: bool,
    /// Print nothing but errors
    #[arg(long, short)]
    pub quiet: bool,
}

/// Disk formats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// Raw disk, without metadata.
    Raw,
    /// qcow2 image.
    Qcow2,
}

impl From<BackingFormat> for Format {
    fn from(format: BackingFormat) -> Format {
        match format {
            BackingFormat::Raw => Format::Raw,
            BackingFormat::Qcow2 => Format::Qcow2,
        }
    }
}

impl Format {
    /// Name of the format in images.
    pub fn word(self) -> &'static str {
        match self {
            Format::Raw => "raw",
            Format::Qcow2 => "qcow2",
        }
    }
}

/// Extent of a repair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum RepairWhat {
    /// Leaked clusters.
    Leaks,
    /// Also wrong refcounts and flags, and invalid entries. The data of such entries is lost.
    All,
}

/// Parses a number of bytes.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let (digits, shift) = match text.as_bytes().last() {
        Some(b'K' | b'k') => (&text[..text.len() - 1], 10),
        Some(b'M' | b'm') => (&text[..text.len() - 1], 20),
        Some(b'G' | b'g') => (&text[..text.len() - 1], 30),
        Some(b'T' | b't') => (&text[..text.len() - 1], 40),
        _ => (text, 0),
    };
    let number = digits.parse::<u64>().ok();
    let bytes = number.and_then(|number| number.checked_mul(1 << shift));
    bytes.filter(|_| !digits.starts_with('+')).ok_or_else(|| {
        format!(
            "{text:?} is not a size: give a number of bytes, or with K, M, G or T (powers of 1024)"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_bytes_or_powers_of_1024() {
        for (text, bytes) in [
            ("512", 512),
            ("64K", 65_536),
            ("2m", 2 << 20),
            ("1T", 1 << 40),
        ] {
            assert_eq!(parse_bytes(text), Ok(bytes));
        }
        for wrong in ["", "K", "-1", "+1G", "1.5G", "99999999999T"] {
            assert!(parse_bytes(wrong).is_err(), "{wrong}");
        }
    }
}
