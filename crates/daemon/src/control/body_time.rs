//! Time limit of request bodies: a client that sends half of a body must not occupy a connection of the API.

use std::error::Error;
use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::middleware::Next;
use axum::response::Response;
use hyper::body::{Body as HttpBody, Frame, SizeHint};
use tokio::time::{Sleep, sleep};

use super::tcp::last;

/// Longest wait for the body of a request, from the end of its head. Slower connections are closed.
pub(super) const BODY_TIME: Duration = Duration::from_secs(30);

/// The body of a request was not complete in time.
#[derive(Debug)]
struct BodyTimeout;

impl fmt::Display for BodyTimeout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the body was not complete in time")
    }
}

impl Error for BodyTimeout {}

/// Returns true if a body could not be read because of the time limit.
pub(super) fn is_timeout(error: &(dyn Error + 'static)) -> bool {
    let mut cause = Some(error);
    while let Some(error) = cause {
        if error.is::<BodyTimeout>() {
            return true;
        }
        cause = error.source();
    }
    false
}

struct TimedBody {
    body: Body,
    limit: Pin<Box<Sleep>>,
}

impl HttpBody for TimedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        if let Poll::Ready(frame) = Pin::new(&mut self.body).poll_frame(context) {
            return Poll::Ready(frame);
        }
        ready!(self.limit.as_mut().poll(context));
        Poll::Ready(Some(Err(axum::Error::new(BodyTimeout))))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Limits the time of a request's body. The connection of a slower client is closed.
pub(super) async fn limit_body_time(
    State(limit): State<Duration>,
    request: Request,
    next: Next,
) -> Response {
    if request.body().is_end_stream() {
        return next.run(request).await;
    }
    let limit = Box::pin(sleep(limit));
    let response = next
        .run(request.map(|body| Body::new(TimedBody { body, limit })))
        .await;
    match response.status() {
        StatusCode::REQUEST_TIMEOUT => last(response),
        _ => response,
    }
}
