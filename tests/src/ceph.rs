//! A Ceph cluster on this machine for tests: one monitor and one BlueStore OSD, on loopback, with cephx.
//!
//! Both are child processes that end with their owner, with all data in one temporary folder. Other clusters of the machine are not
//! accessed. A start takes a few seconds.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde_json::json;
use tempfile::{Builder, TempDir};
use vm::{Process, guest_directory, tool};

use crate::rig::free_portal;
use crate::{Context, Result, bail};

/// Timeout of a command or of a daemon's start on a busy machine.
const LIMIT: Duration = Duration::from_secs(60);

/// Size of the OSD's sparse store in bytes.
const STORE_BYTES: u64 = 4 << 30;

/// User with client permissions for images of all pools.
pub const CEPH_USER: &str = "lunette";

/// Sends commands to the monitor, and then waits until the OSD is up, if the second argument is the epoch of its previous start. Prints the
/// epoch. One process for all is much faster than one `ceph` each.
const MONITOR: &str = r"
import json, os, rados, sys, time
cluster = rados.Rados(conffile=os.environ['CEPH_CONF'], name='client.admin')
cluster.connect(timeout=30)
def ask(command):
    code, output, error = cluster.mon_command(json.dumps(command), b'', timeout=60)
    if code:
        sys.exit(f'{command}: {error}')
    return output
for command in json.loads(sys.argv[1]):
    ask(command)
while len(sys.argv) > 2:
    osd = json.loads(ask({'prefix': 'osd dump', 'format': 'json'}))['osds'][0]
    if osd['up'] and osd['up_from'] > int(sys.argv[2]):
        print(osd['up_from'])
        break
    time.sleep(0.05)
";

/// A running cluster, killed and removed on drop.
pub struct Ceph {
    osd: Option<Process>,
    /// Epoch of the cluster map since which the OSD is up. It changes with each start.
    osd_epoch: u64,
    mon: Option<Process>,
    folder: TempDir,
}

impl Ceph {
    /// Starts a cluster with a pool named `rbd`.
    pub fn start() -> Result<Ceph> {
        let parent = guest_directory();
        std::fs::create_dir_all(&parent)?;
        let folder = Builder::new().prefix("ceph-").tempdir_in(&parent)?;
        let mut ceph = Ceph {
            osd: None,
            osd_epoch: 0,
            mon: None,
            folder,
        };
        ceph.make().context("no Ceph cluster")?;
        Ok(ceph)
    }

    fn make(&mut self) -> Result<()> {
        let (fsid, osd) = (uuid()?, uuid()?);
        for name in ["mon", "osd"] {
            std::fs::create_dir(self.path(name))?;
        }
        let address = format!("[v2:{}/0]", free_portal()?);
        std::fs::write(self.conf(), self.settings(&fsid, &address))?;
        self.make_keys()?;
        let map = self.path("monmap");
        let map = map.to_string_lossy();
        let keys = self.path("keys");
        self.output(
            "monmaptool",
            &["--create", "--fsid", &fsid, "--addv", "a", &address, &map],
        )?;
        self.output(
            "ceph-mon",
            &[
                "--mkfs",
                "-i",
                "a",
                "--monmap",
                &map,
                "--keyring",
                &keys.to_string_lossy(),
            ],
        )?;
        self.start_monitor()?;
        let commands = json!([
            {"prefix": "osd new", "uuid": osd, "id": 0},
            {"prefix": "osd pool create", "pool": "rbd", "pg_num": 8, "pgp_num": 8, "pool_type": "replicated"},
            {"prefix": "osd pool application enable", "pool": "rbd", "app": "rbd"},
        ]);
        self.monitor(&[&commands.to_string()])?;
        self.output("ceph-osd", &["-i", "0", "--mkfs", "--osd-uuid", &osd])?;
        self.start_osd()
    }

    fn monitor(&self, words: &[&str]) -> Result<String> {
        let words = [&["-c", MONITOR][..], words].concat();
        // Debian's Python, which has Ceph's modules.
        self.output("/usr/bin/python3", &words)
    }

    fn settings(&self, fsid: &str, address: &str) -> String {
        let here = self.folder.path().display();
        // Settings for a small cluster with short timeouts and without warnings about missing replicas.
        format!(
            "[global]\n\
             fsid = {fsid}\n\
             mon_host = {address}\n\
             keyring = {here}/keyring\n\
             auth_allow_insecure_global_id_reclaim = false\n\
             public_addr = 127.0.0.1\n\
             cluster_addr = 127.0.0.1\n\
             ms_bind_msgr1 = false\n\
             run_dir = {here}\n\
             admin_socket =\n\
             pid_file =\n\
             log_file = {here}/$name.log\n\
             crash_dir = {here}\n\
             osd_pool_default_size = 1\n\
             osd_pool_default_min_size = 1\n\
             osd_pool_default_pg_autoscale_mode = off\n\
             mon_allow_pool_size_one = true\n\
             mon_allow_pool_delete = true\n\
             mon_warn_on_pool_no_redundancy = false\n\
             mon_data_avail_warn = 0\n\
             mon_data_avail_crit = 0\n\
             mon_osd_down_out_interval = 0\n\
             mon_tick_interval = 1\n\
             paxos_propose_interval = 0.05\n\
             paxos_min_wait = 0.01\n\
             osd_crush_chooseleaf_type = 0\n\
             osd_class_load_list = *\n\
             osd_class_default_list = *\n\
             [client.{CEPH_USER}]\n\
             keyring = {here}/user.keyring\n\
             [mon]\n\
             mon_data = {here}/mon\n\
             [osd]\n\
             osd_data = {here}/osd\n\
             keyring = {here}/osd.keyring\n\
             osd_objectstore = bluestore\n\
             bluestore_block_size = {STORE_BYTES}\n\
             bluestore_block_create = true\n\
             osd_memory_target = 939524096\n\
             osd_op_num_shards = 1\n\
             osd_op_num_threads_per_shard = 2\n"
        )
    }

    /// Creates the keys of all users in separate files; the monitor's initial keyring contains all of them.
    fn make_keys(&self) -> Result<()> {
        let user = format!("client.{CEPH_USER}");
        let entities: [(&str, &str, &[&str]); 4] = [
            ("mon.", "mon.keyring", &["mon", "allow *"]),
            (
                "client.admin",
                "keyring",
                &["mon", "allow *", "osd", "allow *", "mgr", "allow *"],
            ),
            (
                "osd.0",
                "osd.keyring",
                &["mon", "allow profile osd", "osd", "allow *"],
            ),
            (
                &user,
                "user.keyring",
                &["mon", "profile rbd", "osd", "profile rbd"],
            ),
        ];
        let mut all = String::new();
        for (name, file, capabilities) in entities {
            let path = self.path(file);
            let path = path.to_string_lossy();
            let mut words = vec![&*path, "--create-keyring", "--gen-key", "-n", name];
            for capability in capabilities.chunks(2) {
                words.push("--cap");
                words.extend(capability);
            }
            self.output("ceph-authtool", &words)?;
            all.push_str(&std::fs::read_to_string(self.path(file))?);
        }
        std::fs::write(self.path("keys"), all)?;
        Ok(())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Returns the path of the configuration file.
    pub fn conf(&self) -> PathBuf {
        self.path("ceph.conf")
    }

    /// Returns the path of the keyring of [`CEPH_USER`].
    pub fn keyring(&self) -> PathBuf {
        self.path("user.keyring")
    }

    /// Creates a keyring for [`CEPH_USER`] with a wrong key.
    pub fn wrong_keyring(&self) -> Result<PathBuf> {
        let path = self.path("wrong.keyring");
        let user = format!("client.{CEPH_USER}");
        let words = ["--create-keyring", "--gen-key", "-n", &user];
        let path_text = path.to_string_lossy();
        let words: Vec<&str> = [&*path_text].into_iter().chain(words).collect();
        self.output("ceph-authtool", &words)?;
        Ok(path)
    }

    /// Returns the disk specification of an image of this cluster: `rbd:IMAGE,conf=...,id=...,keyring=...`.
    pub fn disk(&self, image: &str) -> String {
        format!("rbd:{image},{}", self.connection())
    }

    /// Returns the connection part of the disk specification.
    pub fn connection(&self) -> String {
        let (conf, keyring) = (self.conf(), self.keyring());
        format!(
            "conf={},id={CEPH_USER},keyring={}",
            conf.display(),
            keyring.display()
        )
    }

    /// Runs a program with this cluster's configuration. Returns its output.
    pub fn output(&self, program: &str, words: &[&str]) -> Result<String> {
        // Without an OSD the cluster answers some commands late or never.
        let output = Command::new(tool("timeout")?)
            .args(["--kill-after=5", &LIMIT.as_secs().to_string()])
            .arg(tool(program)?)
            .args(words)
            .env("CEPH_CONF", self.conf())
            .env_remove("CEPH_ARGS")
            .output()
            .with_context(|| format!("cannot run {program}"))?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        if output.status.code() == Some(124) {
            bail!("{program} {words:?}: no response after {LIMIT:?}");
        }
        if !output.status.success() {
            let error = String::from_utf8_lossy(&output.stderr);
            bail!("{program} {words:?}: {}: {error}{text}", output.status);
        }
        Ok(text)
    }

    /// Runs the `ceph` command.
    pub fn ceph(&self, words: &[&str]) -> Result<String> {
        let limited = ["--connect-timeout", "30"];
        let words: Vec<&str> = limited.into_iter().chain(words.iter().copied()).collect();
        self.output("ceph", &words)
    }

    /// Runs the `rbd` command.
    pub fn rbd(&self, words: &[&str]) -> Result<String> {
        self.output("rbd", words)
    }

    /// Starts the monitor, also after [`Ceph::kill_monitor`].
    pub fn start_monitor(&mut self) -> Result<()> {
        self.mon = Some(self.daemon("ceph-mon", "a")?);
        Ok(())
    }

    /// Kills the monitor with SIGKILL.
    pub fn kill_monitor(&mut self) {
        self.mon = None;
    }

    /// Starts the OSD, also after [`Ceph::kill_osd`], and waits until the monitor reports it as up.
    pub fn start_osd(&mut self) -> Result<()> {
        let osd = self.daemon("ceph-osd", "0")?;
        let log = |error| format!("the OSD did not start: {error}\n{}", osd.log_tail());
        let up = self.monitor(&["[]", &self.osd_epoch.to_string()]);
        self.osd_epoch = up
            .map_err(|error| anyhow::Error::msg(log(error)))?
            .trim()
            .parse()?;
        self.osd = Some(osd);
        Ok(())
    }

    /// Kills the OSD with SIGKILL.
    pub fn kill_osd(&mut self) {
        self.osd = None;
    }

    fn daemon(&self, program: &str, id: &str) -> Result<Process> {
        let mut command = Command::new(tool(program)?);
        command
            .args(["-f", "-i", id])
            .env("CEPH_CONF", self.conf())
            .env_remove("CEPH_ARGS");
        Process::start(program, &command, &self.path(&format!("{program}.out")))
    }

    /// Returns the folder with all files of the cluster.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }
}

fn uuid() -> Result<String> {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/uuid")?;
    Ok(text.trim().to_owned())
}
