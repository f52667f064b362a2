//! Whole configurations: values from files and flags, and reported mistakes.

use std::path::PathBuf;

use super::*;

pub fn here() -> Surroundings {
    Surroundings {
        cpus: vec![0, 1, 2, 3],
        ..Surroundings::of_this_process()
    }
}

pub fn from_file(text: &str) -> Result<Config, Diagnostics> {
    parse(Some(("lunette.toml", text)), &Flags::default(), &here())
}

fn words(list: &[&str]) -> Vec<String> {
    list.iter().map(|word| (*word).to_owned()).collect()
}

/// Returns the mistakes as `line:column message`.
fn mistakes(text: &str) -> Vec<String> {
    let diagnostics = from_file(text).expect_err("has mistakes");
    diagnostics
        .iter()
        .map(|mistake| {
            let (line, column) = mistake.location.line_column();
            format!("{line}:{column} {}", mistake.message)
        })
        .collect()
}

#[test]
#[allow(
    clippy::too_many_lines,
    reason = "one test, from its beginning to its end"
)]
fn flags_equal_the_file() {
    let flags = Flags {
        disk: words(&[
            "d0=ram:512M",
            "d1=null:1G",
            "d2=file:vm,,1.raw,size=10G,cache=none,readonly=on,block_size=4096,serial=A 1,wwn=naa.3a5b000000000001,\
             physical-block-size=16K,removable,copy-across-targets,iops=1000,bandwidth=10M,bandwidth-burst=1G",
        ]),
        vhost_blk: words(&["d0:d0.sock,num-queues=4"]),
        vhost_scsi: words(&["c0:c0.sock"]),
        lun: words(&["c0/0:0=d1", "c0/255:16383=d2"]),
        ..Flags::default()
    }
.with("workers", "2")
.with("cpus", "2,3")
.with("poll-us", "50")
.with("control", "control.sock")
.with("state", "kept")
.with("metrics-listen", "[::1]:9752")
.with("sandbox", "enforce")
.with("api-listen", "[::1]:9753")
.with("token-file", "token")
.with("readers-token-file", "token2")
.with("tls-certificate", "tls.pem")
.with("tls-key", "tls.key")
.with("api-client-ca", "ca.pem")
.with("nbd-client-ca", "ca2.pem")
.with("api-name", "storage1.example")
.with("allow-path", "/srv/a")
.with("sandbox-path", "a")
.with("sandbox-path", "b");
    let text = r#"
        control = "control.sock"
        state = "kept"
        metrics_listen = "[::1]:9752"
        sandbox = "enforce"
        sandbox_paths = ["a", "b"]
        api_listen = "[::1]:9753"
        token_file = "token"
        readers_token_file = "token2"
        tls_certificate = "tls.pem"
        tls_key = "tls.key"
        api_client_ca = "ca.pem"
        nbd_client_ca = "ca2.pem"
        api_names = ["storage1.example"]
        allow_paths = ["/srv/a"]
        workers = 2
        cpus = [2, 3]
        poll_us = 50
        [[disk]]
        name = "d0"
        backend = "ram"
        size = "512M"
        [[disk]]
        name = "d1"
        backend = "null"
        size = 1_073_741_824
        [[disk]]
        name = "d2"
        backend = "file"
        path = "vm,1.raw"
        size = "10GiB"
        cache = "none"
        read_only = true
        block_size = 4096
        serial = "A 1"
        wwn = "3A5B000000000001"
        physical_block_size = 16384
        removable = true
        copy_across_targets = true
        iops = 1000
        bandwidth = "10M"
        bandwidth_burst = "1G"
        [[vhost_blk]]
        disk = "d0"
        socket = "d0.sock"
        queues = 4
        [[vhost_scsi]]
        name = "c0"
        socket = "c0.sock"
        lun = [{ target = 0, lun = 0, disk = "d1" }]
        [[vhost_scsi.lun]]
        target = 255
        lun = 16383
        disk = "d2"
    "#;
    // TOML forbids a table that extends an inline array: only one form may be used.
    let text = text.replace(
        "lun = [{ target = 0, lun = 0, disk = \"d1\" }]",
        "[[vhost_scsi.lun]]\ntarget = 0\nlun = 0\ndisk = \"d1\"",
    );
    let file = from_file(&text).unwrap_or_else(|e| panic!("{e}"));
    let flags = parse(None, &flags, &here()).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(file, flags);
    assert_eq!(
        flags.disk("d2").map(|disk| disk.backend.clone()),
        Some(BlockDeviceConfig::File {
            path: PathBuf::from("vm,1.raw"),
            size: Some(10 << 30),
            cache: CacheMode::None,
            lock: block::FileLock::Always,
        })
    );
}

#[test]
fn lock_while_active_makes_requests_wait_unless_errors_are_wanted() {
    let policy = |keys: &str| {
        let disk = "[[disk]]\nname = \"d\"\nbackend = \"file\"\npath = \"d.raw\"\n";
        let config = from_file(&format!("{disk}{keys}")).unwrap_or_else(|e| panic!("{e}"));
        config.disk("d").map(|disk| disk.errors.on_error)
    };
    let (report, stop) = (block::OnError::Report, block::OnError::Stop);
    assert_eq!(policy("lock = \"always\""), Some(report));
    assert_eq!(policy("lock = \"while-active\""), Some(stop));
    let wanted = "lock = \"while-active\"\non_error = \"report\"";
    assert_eq!(policy(wanted), Some(report));
}

#[test]
fn empty_configuration_gives_defaults() {
    let config = from_file("").unwrap();
    assert_eq!(config.workers.placement, Placement::Count(2));
    assert!(config.disks.is_empty() && config.control.is_none());
}

#[test]
fn a_flag_replaces_a_single_value_and_adds_an_object() {
    let flags = Flags {
        lun: words(&["c0/1:0=d0"]),
        ..Flags::default()
    }
    .with("workers", "3");
    let text = "cpus = [0, 1]\n[[disk]]\nname = 'd0'\nbackend = 'ram'\nsize = 4096\n\
                [[vhost_scsi]]\nname = 'c0'\nsocket = 'c0.sock'\nlun = [{target=0, lun=0, disk='d0'}]\n";
    let config = parse(Some(("f", text)), &flags, &here()).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(config.workers.placement, Placement::Count(3));
    assert_eq!(
        config
            .exports_over(Transport::VhostScsi)
            .next()
            .unwrap()
            .luns
            .len(),
        2
    );
}

#[test]
fn all_mistakes_are_reported_at_once_in_the_order_of_the_text() {
    let text = r#"wokers = 2
cpus = [1, 1, 9]
poll_us = "fast"
[[disk]]
name = "d0"
backend = "rma"
sise = "1G"
[[disk]]
name = "d0"
backend = "ram"
size = "10X"
cache = "none"
[[disk]]
name = "d 2"
backend = "null"
size = 1000
block_size = 1024
read_only = "yes"
[[vhost_blk]]
disk = "d1"
socket = "a.sock"
queues = 257
[[vhost_scsi]]
name = "c0"
socket = "./a.sock"
lun = [
  { target = 256, lun = 0, disk = "d0" },
  { target = 0, lun = 16384, disk = "d0" },
  { target = 1, lun = 1, disk = "d0" },
  { target = 1, lun = 1, disk = "d0", read_only = true },
]
[[vhost_scsi]]
socket = ""
"#;
    assert_eq!(
        mistakes(text),
        [
            "1:1 configuration: no key `wokers`",
            "2:12 CPU 1 is already used at lunette.toml:2:9",
            "2:15 this process is not allowed to run on CPU 9",
            "3:11 `poll_us`: found \"fast\"",
            "6:11 `backend`: found \"rma\"",
            "7:1 disk: no key `sise`",
            "9:8 the disk name `d0` is already used at lunette.toml:5:8",
            "11:8 `size`: \"10X\" is not a size",
            "12:1 disk: `cache` belongs to the back end `file`, and this disk has another",
            "14:8 `name`: found \"d 2\"",
            "16:8 `size`: 1000 bytes are not a whole number of blocks of 512 bytes",
            "17:14 `block_size`: found 1024",
            "18:13 `read_only`: found \"yes\"",
            "20:8 there is no disk `d1`",
            "22:10 `queues`: found 257",
            "25:10 the socket ./a.sock is already used at lunette.toml:21:10",
            "27:14 `target`: found 256",
            "28:23 `lun`: found 16384",
            "30:23 target 1, LUN 1 of this export is already used at lunette.toml:29:23",
            "30:39 lun: no key `read_only`",
            "32:1 vhost_scsi: `name` is missing",
            "33:10 `socket`: found \"\"",
        ]
    );
}

#[test]
fn client_visible_properties_are_checked() {
    let text = r#"
[[disk]]
name = "d0"
backend = "ram"
size = "1G"
wwn = "3000000000000001"
physical_block_size = "4k"
[[disk]]
name = "d1"
backend = "ram"
size = "1G"
wwn = "0x3000000000000001"
block_size = 4096
physical_block_size = 512
removable = 1
[[disk]]
name = "d2"
backend = "ram"
size = "1G"
wwn = "6000000000000001"
physical_block_size = 3000
iops = 0
bandwidth_burst = 4096
"#;
    assert_eq!(
        mistakes(text),
        [
            "12:7 the identifier 3000000000000001 is already used at lunette.toml:6:7",
            "14:23 `physical_block_size`: found 512",
            "15:13 `removable`: found 1",
            "20:7 `wwn`: found \"6000000000000001\"",
            "21:23 `physical_block_size`: found 3000",
            "22:8 `iops`: found 0",
            "23:19 `bandwidth_burst` needs `bandwidth`",
        ]
    );
}

#[test]
fn every_mistake_has_allowed_values_or_a_hint() {
    let text = "wokers = 1\n[[disk]]\nbackend = 'rma'\n[[vhost_blk]]\ndisk='x'\nqueues=0\n";
    for mistake in from_file(text).unwrap_err().iter() {
        assert!(
            mistake.allowed.is_some() || mistake.help.is_some(),
            "{mistake}"
        );
    }
}

#[test]
fn syntax_error_neither_hides_nor_adds_mistakes() {
    let text = "[[disk]]\nname = \"d0\"\nbackend = \"ram\"\nsize = 512M\n\
                [[disk]]\nname = \"d1\"\nbackend = \"rma\"\n[[vhost_blk]]\ndisk = d1\nsocket = \"s\"\n";
    let found = mistakes(text);
    assert_eq!(found.len(), 3, "{found:#?}");
    assert!(found[0].starts_with("4:8 not TOML"), "{found:#?}");
    assert!(found[1].starts_with("7:11 `backend`"), "{found:#?}");
    assert!(found[2].starts_with("9:8 not TOML"), "{found:#?}");
    let shown = from_file(text).unwrap_err().to_string();
    assert!(
        shown.contains("a string needs quotes: size = \"512M\""),
        "{shown}"
    );
}

#[test]
fn number_beside_a_syntax_error_is_not_called_a_string() {
    for text in [
        "workers = 2\nworkers = 3\n",
        "[[disk]]\nread_only = true\nread_only = true\n",
    ] {
        let shown = from_file(text).unwrap_err().to_string();
        assert!(shown.contains("duplicate key"), "{shown}");
        assert!(!shown.contains("quotes"), "{shown}");
    }
}

#[test]
fn a_mistake_in_a_flag_shows_the_flag() {
    let flags = Flags {
        disk: words(&[
            "d0",
            "d1=ram",
            "d2=ram:10MB",
            "d3=file:,size=1M",
            "d4=null:1G,cashe=none",
        ]),
        vhost_blk: words(&["d1"]),
        lun: words(&["c0/0=d1", "c9/0:0=d9"]),
        ..Flags::default()
    }
    .with("workers", "0")
    .with("cpus", "1,x");
    let diagnostics = parse(None, &flags, &here()).unwrap_err();
    let shown: Vec<String> = diagnostics
        .iter()
        .map(|m| format!("{}: {}", m.location, m.message))
        .collect();
    assert_eq!(
        shown,
        [
            "--disk d0: found \"d0\"",
            "--disk d1=ram: disk: `size` is missing",
            "--disk d2=ram:10MB: `size`: \"10MB\" may mean powers of 1000 or of 1024",
            "--disk d3=file:,size=1M: `path`: found \"\"",
            "--disk d4=null:1G,cashe=none: disk: no key `cashe`",
            "--vhost-blk d1: found \"d1\"",
            "--lun c0/0=d1: found \"c0/0=d1\"",
            "--lun c9/0:0=d9: there is no vhost-scsi controller `c9`",
            "--lun c9/0:0=d9: there is no disk `d9`",
            "--workers 0: `workers`: found 0",
            "--cpus 1,x: `cpus`: found \"x\"",
        ]
        .map(|line| line.replace("found 0", "found \"0\""))
    );
}

#[test]
fn one_file_belongs_to_one_disk_however_it_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("a.raw");
    std::fs::write(&file, [0; 512]).unwrap();
    let link = folder.path().join("b.raw");
    std::os::unix::fs::symlink(&file, &link).unwrap();
    let flags = Flags {
        disk: vec![
            format!("d0=file:{}", file.display()),
            format!("d1=file:{}", link.display()),
            format!("d2=file:{}/c.raw,require", folder.path().display()),
            format!("d3=file:{}/d.raw", folder.path().display()),
        ],
        ..Flags::default()
    };
    let diagnostics = parse(None, &flags, &here()).unwrap_err();
    let messages: Vec<&str> = diagnostics.iter().map(|m| m.message.as_str()).collect();
    assert_eq!(messages.len(), 2, "{diagnostics}");
    assert!(messages[0].contains("is already used at --disk d0="));
    assert!(messages[1].starts_with("there is no file"));

    let elsewhere = Surroundings {
        files_are_here: false,
        ..here()
    };
    let flags = Flags {
        disk: vec!["d=file:/no/such/file,require".to_owned()],
        ..Flags::default()
    };
    assert!(parse(None, &flags, &here()).is_err());
    assert!(parse(None, &flags, &elsewhere).is_ok());
}

#[test]
fn empty_list_is_reported_as_empty() {
    let found = mistakes("cpus = []\n");
    assert_eq!(found, ["1:8 `cpus`: found an empty array"]);
}

#[test]
fn workers_and_cpus_that_contradict_are_a_mistake() {
    let found = mistakes("workers = 3\ncpus = [0, 1]\n");
    assert_eq!(found, ["1:11 `workers`: found 3, but `cpus` has 2 CPUs"]);
}

#[test]
fn a_file_that_cannot_be_read_is_reported_as_a_mistake() {
    let path = Path::new("/nonexistent/lunette.toml");
    let diagnostics = load(Some(path), &Flags::default(), &here()).unwrap_err();
    assert!(
        diagnostics.to_string().contains("cannot read"),
        "{diagnostics}"
    );
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("latin1.toml");
    std::fs::write(&path, b"# ok\nname = '\xfc'\n").unwrap();
    let diagnostics = load(Some(&path), &Flags::default(), &here()).unwrap_err();
    assert!(
        diagnostics.to_string().contains("latin1.toml:2:9"),
        "{diagnostics}"
    );
}

#[test]
fn image_keys_are_the_same_in_flags_and_files() {
    let flags = Flags {
        disk: words(&[
            "d=rbd:p/n/i@s,conf=/c,id=me,keyring=/k,mon-host=10.0.0.1,,10.0.0.2,option.rbd_cache=true,\
                       option.rados_osd_op_timeout=30,lock=exclusive",
        ]),
        ..Flags::default()
    };
    let flags = parse(None, &flags, &here()).unwrap_or_else(|e| panic!("{e}"));
    let file = from_file(
        "[[disk]]\nname = \"d\"\nbackend = \"rbd\"\nimage = \"p/n/i@s\"\nconf = \"/c\"\nid = \"me\"\nkeyring = \"/k\"\n\
         mon_host = \"10.0.0.1,10.0.0.2\"\noption = { rbd_cache = true, rados_osd_op_timeout = 30 }\nlock = \"exclusive\"\n",
    );
    let file = file.unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(flags.disks, file.disks);
    let BlockDeviceConfig::Rbd(rbd) = &flags.disks[0].backend else {
        panic!("{:?}", flags.disks)
    };
    assert_eq!(rbd.image.to_string(), "p/n/i@s");
    assert_eq!(rbd.cluster.user(), "client.me");
    assert_eq!(rbd.lock, block::RbdLock::Exclusive);
    assert_eq!(rbd.cluster.options["rados_osd_op_timeout"], "30");

    let disk = |rest: &str| format!("[[disk]]\nname = \"d\"\nbackend = \"rbd\"\n{rest}");
    for (rest, expected) in [
        ("", "1:1 disk: `image` is missing"),
        ("image = \"i\"", "4:9 `image`: found \"i\""),
        (
            "image = \"p/i\"\nsize = \"1G\"",
            "5:8 `size`: not allowed, because the image determines the size",
        ),
        (
            "image = \"p/i\"\npath = \"x\"",
            "5:1 disk: `path` belongs to the back end `file`, and this disk has another",
        ),
        (
            "image = \"p/i\"\noption = { key = \"secret\" }",
            "5:12 `option.key` would be visible to all readers of the configuration",
        ),
        (
            "image = \"p/i\"\noption = { a = [1] }",
            "5:16 `a`: found an array",
        ),
    ] {
        assert_eq!(mistakes(&disk(rest)), [expected], "{rest}");
    }
    let elsewhere = "[[disk]]\nname = \"d\"\nbackend = \"ram\"\nsize = \"1M\"\nconf = \"x\"";
    assert_eq!(
        mistakes(elsewhere),
        ["5:1 disk: `conf` belongs to the back end `rbd`, and this disk has another"]
    );
}

#[test]
fn names_of_abstract_sockets_are_refused() {
    let found = mistakes(
        "control = \"@control\"\n[[disk]]\nname = \"d0\"\nbackend = \"ram\"\nsize = \"1M\"\n\
         [[vhost_blk]]\ndisk = \"d0\"\nsocket = \"@d0\"\n",
    );
    assert_eq!(found.len(), 2, "{found:#?}");
    assert!(
        found.iter().all(|text| text.contains("abstract sockets")),
        "{found:#?}"
    );
    assert!(found[0].contains("./@control"), "{found:#?}");
}

#[test]
fn incomplete_files_of_tls_are_refused() {
    let found = mistakes(
        "tls_certificate = \"/a\"\n[[disk]]\nname = \"d0\"\nbackend = \"ram\"\nsize = \"1M\"\n",
    );
    assert_eq!(found.len(), 1, "{found:#?}");
    assert!(
        found[0].contains("`tls_certificate` needs `tls_key`"),
        "{found:#?}"
    );
    let found = mistakes("tls_key = \"/a\"\napi_client_ca = \"/b\"\n");
    assert_eq!(found.len(), 2, "{found:#?}");
    assert!(
        found
            .iter()
            .all(|text| text.contains("needs `tls_certificate`")),
        "{found:#?}"
    );
    let complete = "tls_key = \"/a\"\ntls_certificate = \"/b\"\napi_client_ca = \"/c\"\n";
    assert!(from_file(complete).is_ok());
}

#[test]
fn body_has_no_name_and_lists_logical_units_in_their_order() {
    let flags = Flags {
        disk: words(&["d0=ram:1M", "d1=ram:1M"]),
        vhost_scsi: words(&["s0:/run/s0.sock"]),
        lun: words(&["s0/0:2=d1", "s0/0:1=d0"]),
        ..Flags::default()
    };
    let config = parse(None, &flags, &here()).unwrap();
    let names = |values: Vec<(String, serde_json::Value)>| -> Vec<String> {
        values.into_iter().map(|(name, _)| name).collect()
    };
    let disk = names(config.disks[0].body_values());
    assert!(!disk.contains(&"name".to_owned()) && !disk.contains(&"backend".to_owned()));
    assert!(disk.contains(&"size".to_owned()), "{disk:?}");
    let export = config.export("s0").unwrap().body_values();
    let luns = &export.iter().find(|(name, _)| name == "lun").unwrap().1;
    assert_eq!((&luns[0]["lun"], &luns[1]["lun"]), (&1.into(), &2.into()));
    assert!(!names(export).contains(&"name".to_owned()));
}
