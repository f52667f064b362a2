//! Reasons of failed CHAP logins, as the target reports them in its log.

mod common;

use common::{Pipes, Policy, settings, small_offer, user};
use iscsi::chap::{Algorithm, Secret};
use iscsi::initiator::{InitiatorError, InitiatorSettings};
use iscsi::login::{ChapFailure, Credentials, LoginError};

const SECRET: &str = "twelve bytes and more";

fn logged(settings: InitiatorSettings) -> (InitiatorError, Option<String>, ChapFailure) {
    let mut policy = Policy::open(small_offer());
    policy.chap = vec![Algorithm::Sha256];
    policy.users.insert("joe".to_owned(), user(SECRET, None));
    let mut pipes = Pipes::new(policy, settings, 5);
    pipes.connect();
    let error = pipes.error.take().expect("the login fails");
    let failure = pipes.target_ends[0].connection.chap_failure();
    let (user, reason) = failure.expect("a reason");
    (error, user.map(str::to_owned), reason)
}

fn with_user(name: &str, secret: &str, mutual: bool) -> InitiatorSettings {
    let target = || ("target".to_owned(), Secret::new("another long secret"));
    InitiatorSettings {
        credentials: Some(Credentials {
            name: name.to_owned(),
            secret: Secret::new(secret),
            mutual: mutual.then(target),
            algorithms: vec![Algorithm::Sha256],
        }),
        ..settings(small_offer())
    }
}

#[test]
fn target_knows_the_user_and_the_reason() {
    for (name, secret, mutual, expected) in [
        ("jim", SECRET, false, ChapFailure::UnknownUser),
        (
            "joe",
            "not the secret of joe",
            false,
            ChapFailure::WrongResponse,
        ),
        ("joe", SECRET, true, ChapFailure::NoTargetSecret),
    ] {
        let (error, user, reason) = logged(with_user(name, secret, mutual));
        let status = 0x0201;
        assert!(
            matches!(error, InitiatorError::Login(LoginError::Refused { status: found, .. }) if found == status),
            "{error:?}"
        );
        assert_eq!((user.as_deref(), reason), (Some(name), expected));
    }
    let (error, user, reason) = logged(settings(small_offer()));
    assert_eq!((user, reason), (None, ChapFailure::NoUser));
    let text = error.to_string();
    assert!(text.contains("the target may require CHAP"), "{text}");
}
