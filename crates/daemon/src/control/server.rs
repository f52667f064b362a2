//! The HTTP server: one thread, one single-threaded runtime, a router of resources.

use std::io;
use std::path::Path;
use std::time::Duration;

use axum::extract::ConnectInfo;
use axum::http::StatusCode;
use axum::{Extension, middleware};
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use tokio::net::UnixListener;

use super::ErrorResponse;
use super::access::{Guarded, check};
use super::api::{Api, router};
use super::body_time::{BODY_TIME, limit_body_time};
use super::browsers::{Names, local_name, same_site};
use super::socket::{Bound, ControlSocket};
use crate::service_thread::{Connections, ServiceThread, http};
use config::AccessConfig;

/// Longest wait for the head of each request. Slower connections are closed.
pub(super) const HEAD_TIME: Duration = Duration::from_secs(15);

/// Server of a control socket. Dropping it removes the socket.
#[derive(Debug)]
pub struct Server {
    // Dropped first, before the socket's path is removed.
    _thread: ServiceThread,
    bound: Bound,
}

impl Server {
    /// Serves the API on a socket.
    pub fn start(bound: Bound, api: Api, access: AccessConfig) -> io::Result<Server> {
        Server::start_with(bound, api, access, [HEAD_TIME, BODY_TIME])
    }

    fn start_with(
        bound: Bound,
        api: Api,
        access: AccessConfig,
        times: [Duration; 2],
    ) -> io::Result<Server> {
        let listener = bound.listener()?;
        let thread = ServiceThread::start("control", async move |connections: &Connections| {
            serve(listener, api, access, times, connections).await
        })?;
        Ok(Server {
            _thread: thread,
            bound,
        })
    }

    /// Returns the path of the socket.
    pub fn path(&self) -> &Path {
        self.bound.path()
    }

    /// Ends the server and hands over the open socket, so that no client is refused.
    pub fn hand_over(self) -> Option<ControlSocket> {
        // No connection is accepted after this point.
        let Server { _thread, bound } = self;
        drop(_thread);
        bound.hand_over()
    }
}

async fn serve(
    listener: std::os::unix::net::UnixListener,
    api: Api,
    access: AccessConfig,
    [head_time, body_time]: [Duration; 2],
    connections: &Connections,
) -> io::Result<()> {
    let listener = UnixListener::from_std(listener)?;
    let names = Names::new(&access.api_names);
    let guarded = Guarded::new(listener, access);
    let routes = router(api)
        .layer(middleware::from_fn_with_state(body_time, limit_body_time))
        .layer(middleware::from_fn(check))
        .layer(middleware::from_fn_with_state(names.clone(), same_site))
        .layer(middleware::from_fn_with_state(names, local_name));
    loop {
        let (conversation, peer) = guarded.accept().await;
        let routes = routes.clone().layer(Extension(ConnectInfo(peer)));
        let (stream, service) = (TokioIo::new(conversation), TowerToHyperService::new(routes));
        let accepted = connections.accepted();
        tokio::spawn(accepted.serve(http(head_time), stream, service));
    }
}

/// Runs a call that may block on a thread of its own. Without a thread the request fails, and may be repeated.
pub(super) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, ErrorResponse> {
    let result = crate::blocking_call::blocking(work).await;
    result.map_err(|error| match error.kind() {
        io::ErrorKind::Other => ErrorResponse::internal(error.to_string()),
        _ => ErrorResponse::new(StatusCode::SERVICE_UNAVAILABLE, error.to_string()),
    })
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::sync::Arc;

    use latency::{Labels, QueueSnapshot, Snapshot};

    use ::control::statistics::Statistics;
    use ::control::{Client, ClientError, Log, Method, Status, Version, get, latency_path};

    use super::super::{View, bind};
    use super::*;
    use crate::control::Audience;
    use crate::objects::{EventBus, Manager};

    struct Fixed;

    impl View for Fixed {
        fn snapshot(&self) -> Snapshot {
            let queue = |export: &str, queue| QueueSnapshot {
                labels: Labels {
                    export: export.to_owned(),
                    queue,
                    ..Labels::default()
                },
                ..QueueSnapshot::default()
            };
            Snapshot {
                queues: vec![queue("c0", 0), queue("c0", 1), queue("d0", 0)],
            }
        }

        fn status(&self) -> Status {
            Status {
                pid: 42,
                ..Status::default()
            }
        }

        fn log(&self) -> Option<crate::LogHandle> {
            Some(crate::LogHandle(Arc::new(Fixed)))
        }

        fn statistics(&self) -> Statistics {
            Statistics {
                at_ns: 7,
                latency: self.snapshot(),
                ..Statistics::default()
            }
        }
    }

    impl crate::LogLevels for Fixed {
        fn filter(&self) -> String {
            "info".to_owned()
        }

        fn set_filter(&self, filter: &str) -> Result<(), String> {
            match filter {
                "debug" => Ok(()),
                _ => Err(format!("{filter} is not a level")),
            }
        }
    }

    fn served() -> (tempfile::TempDir, Server, PathBuf) {
        served_with([HEAD_TIME, BODY_TIME])
    }

    fn served_with(times: [Duration; 2]) -> (tempfile::TempDir, Server, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control.sock");
        let api = Api {
            view: Arc::new(Fixed),
            manager: Manager::idle(),
            overview: None,
            events: EventBus::default().sender(),
            jobs: None,
            ending: None,
            reload: None,
        };
        let access = AccessConfig::default();
        let server = Server::start_with(
            bind(&path, Audience::Owner, None).unwrap(),
            api,
            access,
            times,
        )
        .unwrap();
        (folder, server, path)
    }

    #[test]
    fn resources_are_answered_as_json() {
        let (_folder, server, path) = served();
        assert_eq!(
            get::<Version>(&path, "/v1/version").unwrap(),
            Version::this()
        );
        assert_eq!(get::<Status>(&path, "/v1/status").unwrap().pid, 42);
        let statistics: Statistics = get(&path, "/v1/statistics").unwrap();
        assert_eq!((statistics.at_ns, statistics.latency.queues.len()), (7, 3));
        let all: Snapshot = get(&path, "/v1/latency").unwrap();
        assert_eq!(all.queues.len(), 3);
        let one: Snapshot = get(&path, &latency_path(Some("c0/1"), 0)).unwrap();
        assert_eq!(one.queues.len(), 1);
        drop(server);
        assert!(!path.exists());
    }

    #[test]
    fn silent_client_frees_its_connection() {
        use std::io::{Read, Write};
        let (_folder, _server, path) = served_with([Duration::from_millis(200); 2]);
        let patient = Some(Duration::from_secs(60));
        let says = |words: &[u8]| {
            let mut stream = std::os::unix::net::UnixStream::connect(&path).unwrap();
            stream.set_read_timeout(patient).unwrap();
            stream.write_all(words).unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).expect("hung up on");
            answer
        };
        says(b"");
        says(b"GET /v1/version HTTP/1.1\r\n");
        let asked_once = says(b"GET /v1/version HTTP/1.1\r\nhost: x\r\n\r\n");
        assert!(asked_once.starts_with("HTTP/1.1 200"), "{asked_once}");
        for half in [
            "content-length: 9\r\n\r\n{",
            "transfer-encoding: chunked\r\n\r\n9\r\n{",
        ] {
            let late = says(format!("PUT /v1/log HTTP/1.1\r\nhost: x\r\n{half}").as_bytes());
            assert!(late.starts_with("HTTP/1.1 408"), "{late}");
            assert!(late.contains("application/problem+json"), "{late}");
        }
    }

    #[test]
    fn the_log_is_shown_and_changed_and_a_wrong_filter_refused() {
        let (_folder, _server, path) = served();
        let client = Client::new(&path);
        let log = |filter: &str| serde_json::json!({"filter": filter});
        assert_eq!(client.get::<Log>("/v1/log").unwrap().filter, "info");
        let put = |body| client.change(Method::PUT, "/v1/log", Some(&body));
        assert_eq!(put(log("debug")).unwrap(), (200, log("debug")));
        for body in [log("loud"), serde_json::json!({"filtre": "info"})] {
            match put(body) {
                Err(ClientError::Problem { problem, .. }) => assert_eq!(problem.status, 422),
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn missing_resource_is_named_in_the_problem() {
        let (_folder, _server, path) = served();
        for (asked, status, named) in [
            ("/v1/nothing", 404, "/v1/nothing"),
            ("/v1/latency?select=x9", 404, "`x9`"),
            ("/v1/latency?selct=x9", 400, "selct"),
        ] {
            match get::<Snapshot>(&path, asked) {
                Err(ClientError::Problem { problem, .. }) => {
                    assert_eq!(problem.status, status, "{asked}");
                    assert!(problem.detail.contains(named), "{problem:?}");
                }
                other => panic!("{asked}: {other:?}"),
            }
        }
    }

    #[test]
    fn missing_and_dead_sockets_have_distinct_errors() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control.sock");
        let error = get::<Status>(&path, "/v1/status").unwrap_err();
        assert!(error.to_string().contains("no daemon"), "{error}");
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        let error = get::<Status>(&path, "/v1/status").unwrap_err();
        assert!(error.to_string().contains("no process listens"), "{error}");
    }
}
