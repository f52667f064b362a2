//! The example `contrib/lunette.toml` is valid and contains every key.

use super::*;

const EXAMPLE: &str = include_str!("../../../contrib/lunette.toml");

#[test]
fn documented_example_is_valid_and_has_every_key() {
    let here = Surroundings {
        cpus: (0..64).collect(),
        ..Surroundings::of_this_process()
    };
    let config = parse(
        Some(("contrib/lunette.toml", EXAMPLE)),
        &Flags::default(),
        &here,
    );
    let config = config.unwrap_or_else(|e| panic!("{e}"));
    assert!(
        config.exports_over(Transport::VhostBlk).next().is_some()
            && config.exports_over(Transport::VhostScsi).next().is_some()
    );
    for line in render(&config).lines() {
        if let Some((key, _)) = line.split_once(" = ")
            && !key.starts_with(' ')
        {
            assert!(
                EXAMPLE.contains(&format!("{key} =")),
                "{key} is not in the example"
            );
        }
    }
}

#[test]
fn the_documented_example_has_each_key_that_is_allowed() {
    let text = "no = 1\n[[disk]]\nno = 1\n[[vhost_blk]]\nno = 1\n[[vhost_scsi]]\nno = 1\nlun = [{ no = 1 }]\n\
                [[nbd]]\nno = 1\n[[iscsi]]\nno = 1\nlun = [{ no = 1 }]\nacl = [{ no = 1 }]\n[iscsi_limits]\nno = 1\n";
    let found = parse(
        Some(("lunette.toml", text)),
        &Flags::default(),
        &Surroundings::of_this_process(),
    )
    .unwrap_err();
    let unknown = found.iter().filter(|m| m.message.contains("no key `no`"));
    let allowed: Vec<&str> = unknown
        .filter_map(|mistake| mistake.allowed.as_deref())
        .collect();
    assert_eq!(allowed.len(), 10, "{found}");
    for key in allowed
        .iter()
        .flat_map(|keys| keys.split('`').skip(1).step_by(2))
    {
        let spellings = [format!("{key} ="), format!("[{key}]")];
        assert!(
            spellings.iter().any(|spelling| EXAMPLE.contains(spelling)),
            "{key} is not in the example"
        );
    }
}
