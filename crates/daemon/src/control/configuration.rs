//! `/v1/config`: all objects at once, as they are in effect, what of it was changed at run time, and reading the file
//! anew.

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::http::header;
use axum::response::IntoResponse;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::Problem;
use super::answers::{Alters, Looks, Takes};
use super::api::{Api, Force, ForceQuery, force, json};
use super::server::blocking;
use crate::config::{objects_json, render};
use crate::objects::bodies::{Disk, Export};
use crate::objects::{Change, How, Overlay, Plan, Refusal};

/// All disks and exports.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Objects {
    /// The disks.
    pub disks: Vec<Disk>,
    /// The exports, with their logical units.
    pub exports: Vec<Export>,
}

/// What was changed at run time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Changes {
    /// Do they come back after a restart?
    pub kept: bool,
    /// A line for each, `+` or `-` and the object.
    pub changes: Vec<String>,
}

/// How many objects came, changed and went.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Summary {
    /// Disks that came.
    pub disks_added: usize,
    /// Disks that went.
    pub disks_removed: usize,
    /// Disks that have another size.
    pub disks_resized: usize,
    /// Disks whose clients may do more or less.
    #[serde(default)]
    pub disks_limited: usize,
    /// Exports that came.
    pub exports_added: usize,
    /// Exports that went.
    pub exports_removed: usize,
    /// Exports that came anew in another form.
    pub exports_replaced: usize,
    /// iSCSI targets that stay and whose CHAP users are others.
    #[serde(default)]
    pub chap_users_changed: usize,
    /// 1 where discovery sessions have other CHAP users.
    #[serde(default)]
    pub discovery_users_changed: usize,
    /// Exports that other workers serve from now on.
    #[serde(default)]
    pub exports_placed: usize,
    /// Logical units that came to exports that were there.
    pub luns_added: usize,
    /// Logical units that went from exports that stay.
    pub luns_removed: usize,
}

impl Summary {
    /// What a plan did.
    pub fn of(plan: &Plan) -> Summary {
        Summary {
            disks_added: plan.add_disks.len(),
            disks_removed: plan.remove_disks.len(),
            disks_resized: plan.resize.len(),
            disks_limited: plan.limit.len(),
            exports_added: plan.add_exports.len(),
            exports_removed: plan.remove_exports.len(),
            exports_replaced: plan.replace_exports.len(),
            chap_users_changed: plan.chap_users.len(),
            discovery_users_changed: plan.discovery_users.into(),
            exports_placed: plan.place_exports.len(),
            luns_added: plan.add_luns.iter().map(|(_, luns)| luns.len()).sum(),
            luns_removed: plan.remove_luns.iter().map(|(_, luns)| luns.len()).sum(),
        }
    }
}

/// All disks and exports as they are in effect.
#[utoipa::path(get, path = "/v1/config", responses(
    (status = 200, description = "All disks and exports", body = Objects),
    Looks,
))]
pub(super) async fn show(State(api): State<Api>) -> Result<Json<Objects>, Problem> {
    let live = api.overview()?.live();
    Ok(Json(Objects {
        disks: live.config.disks.iter().map(Disk::of).collect(),
        exports: live.config.exports().map(Export::of).collect(),
    }))
}

/// There are these disks and exports and no others: the smallest set of changes is made, or none.
#[utoipa::path(put, path = "/v1/config", params(Force), request_body = Objects, responses(
    (status = 200, description = "It is so", body = Summary),
    Alters, Takes,
))]
pub(super) async fn replace(
    State(api): State<Api>,
    query: ForceQuery,
    body: Result<Bytes, BytesRejection>,
) -> Result<Json<Summary>, Problem> {
    let force = force(query)?;
    let body = json(body)?;
    let base = api.overview()?.live().config.without_objects();
    let wanted = blocking(move || objects_json(&body, base)).await?;
    let change = Change::Replace(Box::new(wanted.map_err(Refusal::from)?));
    let made = api.change(change, force).await?;
    Ok(Json(Summary::of(&made.plan)))
}

/// The configuration that is in effect, as the text of a file.
#[utoipa::path(get, path = "/v1/config/file", responses(
    (status = 200, description = "TOML", body = String, content_type = "text/plain"),
    Looks,
))]
pub(super) async fn text(State(api): State<Api>) -> Result<impl IntoResponse, Problem> {
    let text = render(&api.overview()?.live().config);
    Ok(([(header::CONTENT_TYPE, "text/plain")], text))
}

/// What was changed at run time, beside the file and the flags.
#[utoipa::path(get, path = "/v1/config/changes", responses(
    (status = 200, description = "The changes", body = Changes),
    Looks,
))]
pub(super) async fn changes(State(api): State<Api>) -> Result<Json<Changes>, Problem> {
    let overview = api.overview()?;
    let live = overview.live();
    Ok(Json(Changes {
        kept: overview.keeps,
        changes: Overlay::between(&live.base, &live.config).lines(),
    }))
}

/// Reads the file anew: the smallest set of changes is made, or none. What was changed at run time stays.
#[utoipa::path(post, path = "/v1/config/reload", params(Force), responses(
    (status = 200, description = "It is as the file says", body = Summary),
    Alters,
))]
pub(super) async fn reload(
    State(api): State<Api>,
    query: ForceQuery,
) -> Result<Json<Summary>, Problem> {
    let force = force(query)?;
    let Some(reload) = api.reload.clone() else {
        let detail = "this daemon was started without a file";
        return Err(Problem::new(axum::http::StatusCode::CONFLICT, detail));
    };
    let read = blocking(move || reload()).await?;
    let config = read.map_err(|mistakes| {
        let text = mistakes.to_string();
        Problem {
            // With the places in the file, which are no pointers into a body.
            detail: text,
            ..Problem::from(Refusal::from(mistakes))
        }
    })?;
    let how = How {
        force,
        ..How::default()
    };
    let made = api.manager.ask(move |owner| owner.reload(config, how));
    Ok(Json(Summary::of(&made.await?.plan)))
}
