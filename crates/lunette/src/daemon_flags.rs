//! Flags of the daemon, declared in `config` with their configuration keys.

use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};
use config::{DAEMON_KEYS, DaemonKey, Flag};

/// Given flags: name and value.
#[derive(Clone, Debug, Default)]
pub struct DaemonFlags(pub Vec<(&'static str, String)>);

fn flags() -> impl Iterator<Item = (&'static DaemonKey, &'static Flag)> {
    let keys = DAEMON_KEYS.iter();
    keys.filter_map(|known| Some((known, known.flag.as_ref()?)))
}

impl Args for DaemonFlags {
    fn augment_args(command: Command) -> Command {
        command.args(flags().map(|(known, flag)| {
            Arg::new(flag.name)
                .long(flag.name)
                .value_name(flag.value_name)
                .help(known.flag_help())
                .action(match known.is_repeated() {
                    true => ArgAction::Append,
                    false => ArgAction::Set,
                })
        }))
    }

    fn augment_args_for_update(command: Command) -> Command {
        DaemonFlags::augment_args(command)
    }
}

impl FromArgMatches for DaemonFlags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<DaemonFlags, clap::Error> {
        let given = flags().flat_map(|(_, flag)| {
            let texts = matches.get_many::<String>(flag.name);
            let texts = texts.into_iter().flatten();
            texts.map(|text| (flag.name, text.clone()))
        });
        Ok(DaemonFlags(given.collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = DaemonFlags::from_arg_matches(matches)?;
        Ok(())
    }
}
