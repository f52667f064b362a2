//! `lunette rbd`: lists images of a Ceph pool. Connects to the cluster directly, without a daemon.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;

use bdev::librbd::{Cluster, ClusterConfig, Error, Image, ImageName, Pool};
use clap::{Args, Subcommand};
use serde::Serialize;

use crate::failure::{Failure, Outcome};
use crate::objects::table::Table;
use crate::objects::{print_json, size_text};

/// `lunette rbd`
#[derive(Debug, Args)]
#[command(after_help = AFTER_RBD)]
pub struct RbdCommand {
    /// Subcommand
    #[command(subcommand)]
    pub action: RbdAction,
}

/// Actions of `lunette rbd`.
#[derive(Debug, Subcommand)]
pub enum RbdAction {
    /// List the images of a pool
    List {
        /// Pool, or a namespace in it
        #[arg(value_name = "POOL[/NAMESPACE]")]
        pool: String,
        /// Cluster and user
        #[command(flatten)]
        connection: Connection,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
}

/// Cluster and user, with the keys of a disk.
#[derive(Debug, Args)]
pub struct Connection {
    /// Ceph's configuration file [default: Ceph's default paths]
    #[arg(long, value_name = "FILE")]
    pub conf: Option<PathBuf>,
    /// Ceph user, without `client.` [default: admin]
    #[arg(long, value_name = "USER")]
    pub id: Option<String>,
    /// File with the user's key [default: from the configuration file]
    #[arg(long, value_name = "FILE")]
    pub keyring: Option<PathBuf>,
    /// Addresses of monitors [default: from the configuration file]
    #[arg(long, value_name = "ADDRESS,...")]
    pub mon_host: Option<String>,
    /// Another option of Ceph's configuration; may be given several times
    #[arg(long, value_name = "KEY=VALUE")]
    pub option: Vec<String>,
}

const AFTER_RBD: &str = "\
Examples:
    lunette rbd list rbd
    lunette rbd list rbd/tenant --id lunette --keyring /etc/ceph/ceph.client.lunette.keyring --json

Serve an image:
    lunette serve --disk d0=rbd:rbd/vm1,id=lunette --vhost-blk d0:d0.sock";

#[derive(Debug, Serialize)]
struct Listed {
    name: String,
    size: u64,
    object_size: u64,
    features: Vec<&'static str>,
}

/// Names of `RBD_FEATURE_*` by bit number.
const FEATURES: [&str; 10] = [
    "layering",
    "striping",
    "exclusive-lock",
    "object-map",
    "fast-diff",
    "deep-flatten",
    "journaling",
    "data-pool",
    "operations",
    "migrating",
];

pub fn run(command: RbdCommand) -> Outcome {
    let RbdAction::List {
        pool,
        connection,
        json,
    } = command.action;
    let config = connection.config()?;
    let images = list(&config, &pool).map_err(|error| Failure::because(error.to_string()))?;
    if json {
        return print_json(&images);
    }
    let mut table = Table::new(&["IMAGE", "SIZE", "OBJECTS OF", "FEATURES"]);
    for image in images {
        table = table.row([
            image.name,
            size_text(image.size),
            size_text(image.object_size),
            image.features.join(","),
        ]);
    }
    write!(cli_common::stdout(), "{table}")?;
    Ok(())
}

impl Connection {
    fn config(self) -> Result<ClusterConfig, Failure> {
        let mut options = BTreeMap::new();
        for option in &self.option {
            let Some((key, value)) = option.split_once('=') else {
                return Err(Failure::mistake(format!(
                    "--option {option}: not KEY=VALUE, such as rados_osd_op_timeout=30"
                )));
            };
            options.insert(key.to_owned(), value.to_owned());
        }
        Ok(ClusterConfig {
            conf: self.conf,
            id: self.id,
            keyring: self.keyring,
            mon_host: self.mon_host,
            options,
        })
    }
}

fn list(config: &ClusterConfig, pool: &str) -> Result<Vec<Listed>, Error> {
    let cluster = Cluster::connect(config)?;
    let (pool_name, namespace) = match pool.split_once('/') {
        Some((pool, namespace)) => (pool, Some(namespace)),
        None => (pool, None),
    };
    let pool = Arc::new(Pool::of(&cluster, pool_name, namespace)?);
    let mut listed = Vec::new();
    for name in pool.images()? {
        let image = ImageName {
            pool: pool_name.to_owned(),
            namespace: namespace.map(str::to_owned),
            image: name.clone(),
            snapshot: None,
        };
        let shape = Image::open(&cluster, &image, true).and_then(|image| image.shape());
        let shape = match shape {
            // The image was removed after listing.
            Err(error) if error.errno() == rustix::io::Errno::NOENT.raw_os_error() => continue,
            shape => shape?,
        };
        let named = (0..).zip(FEATURES);
        listed.push(Listed {
            name,
            size: shape.size,
            object_size: shape.object_size,
            features: named
                .filter(|(bit, _)| shape.features >> bit & 1 != 0)
                .map(|(_, feature)| feature)
                .collect(),
        });
    }
    Ok(listed)
}
