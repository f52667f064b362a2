//! Calls that may block, for services whose runtime has one thread.

use std::io;

use tokio::sync::oneshot;

/// Runs `work` on a thread of its own. `tokio::task::spawn_blocking` panics if the kernel refuses a thread.
///
/// # Errors
/// The kernel refuses a thread, or `work` panicked.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<T> {
    let (reply, done) = oneshot::channel();
    std::thread::Builder::new()
        .name("blocking-call".to_owned())
        .spawn(move || {
            // The caller may have left.
            reply.send(work()).ok();
        })
        .map_err(|error| io::Error::new(error.kind(), no_thread("for this request", &error)))?;
    done.await
        .map_err(|_| io::Error::other("the thread panicked; hint: see the daemon's log"))
}

/// Returns the message about a thread that the kernel refuses.
pub fn no_thread(purpose: &str, error: &io::Error) -> String {
    format!(
        "cannot start a thread {purpose}: {error}; hint: raise TasksMax= of the unit, or ulimit -u"
    )
}

#[cfg(test)]
mod tests {
    #[tokio::test]
    async fn result_or_the_end_of_the_thread_is_returned() {
        assert_eq!(super::blocking(|| 7).await.unwrap(), 7);
        let ended = super::blocking(|| panic!("work of a test")).await;
        let ended: std::io::Result<()> = ended;
        assert!(ended.unwrap_err().to_string().contains("panicked"));
    }
}
