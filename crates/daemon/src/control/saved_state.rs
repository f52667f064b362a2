//! `/v1/state`: files of the state folder, and the reset of damaged ones.

use ::control::StateFile;
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;

use super::ErrorResponse;
use super::api::{Api, Path};
use super::error_responses::{ChangeErrors, NameErrors, ReadErrors};

/// List the files of the state folder, with their condition.
#[utoipa::path(get, path = "/v1/state", operation_id = "list_state_files", responses(
    (status = 200, description = "All files but locks", body = Vec<StateFile>),
    ReadErrors,
))]
pub(super) async fn list_state(
    State(api): State<Api>,
) -> Result<Json<Vec<StateFile>>, ErrorResponse> {
    let files = api.manager.ask(|owner| Ok(owner.state_files())).await?;
    Ok(Json(files))
}

/// Reset a damaged state file, or the record of a logical unit: move it aside, and serve its object with the default state. State in memory
/// is saved again.
#[utoipa::path(delete, path = "/v1/state/{file}", operation_id = "reset_state_file",
    params(("file" = String, Path, description = "Name of the file, relative to the state folder")),
    responses((status = 204, description = "Reset"), NameErrors, ChangeErrors))]
pub(super) async fn reset_state(
    State(api): State<Api>,
    Path(file): Path<String>,
) -> Result<StatusCode, ErrorResponse> {
    api.manager
        .ask(move |owner| owner.reset_state(&file))
        .await?;
    Ok(StatusCode::NO_CONTENT)
}
