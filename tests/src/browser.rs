//! Drives Debian's Chromium through the WebDriver protocol (W3C WebDriver 2).

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::Scratch;
use anyhow::{Context, Result, ensure};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Value, json};
use vm::wait_until;

use crate::rig::free_portal;

/// Time limit for changes of the page, far above the usual time.
const SOON: Duration = Duration::from_secs(30);
/// Trace categories with the tasks of threads.
const TRACED: &str = "disabled-by-default-devtools.timeline";
/// Key of an element reference (W3C WebDriver 2, section 12.1).
const ELEMENT: &str = "element-6066-11e4-a52e-4f735466cecf";

/// A headless browser window.
pub struct Browser {
    driver: Child,
    address: String,
    session: String,
}

/// An element of the document.
#[derive(Clone, Debug)]
pub struct Element(String);

impl Browser {
    /// Opens a window of this size.
    ///
    /// # Errors
    /// Fails if the browser is missing or does not start.
    pub fn open(scratch: &Scratch, size: (u32, u32)) -> Result<Browser> {
        Browser::open_with(scratch, size, json!({}))
    }

    /// Opens a window of this size and records the tasks of its threads for [`Browser::tasks`].
    ///
    /// # Errors
    /// As [`Browser::open`].
    pub fn traced(scratch: &Scratch, size: (u32, u32)) -> Result<Browser> {
        let categories = json!({"traceCategories": TRACED});
        Browser::open_with(scratch, size, json!({"perfLoggingPrefs": categories}))
    }

    fn open_with(scratch: &Scratch, size: (u32, u32), mut options: Value) -> Result<Browser> {
        let portal = free_portal()?;
        let driver = Command::new("chromedriver")
            .arg(format!("--port={}", portal.port()))
            // The browser leaves folders there. The path is short, because they contain sockets.
            .env("TMPDIR", scratch.sockets())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context("cannot run chromedriver; hint: apt-get install chromium-driver")?;
        let mut browser = Browser {
            driver,
            address: portal.to_string(),
            session: String::new(),
        };
        let up = || TcpStream::connect(&browser.address).ok();
        wait_until(SOON, up).context("chromedriver does not answer")?;
        let profile = scratch.file(&format!("profile-{}", portal.port()));
        let arguments = [
            "--headless".to_owned(),
            "--no-sandbox".to_owned(),
            "--disable-gpu".to_owned(),
            "--hide-scrollbars".to_owned(),
            format!("--window-size={},{}", size.0, size.1),
            format!("--user-data-dir={}", profile.display()),
        ];
        options["args"] = json!(arguments);
        let wanted = json!({"capabilities": {"alwaysMatch": {
            "goog:chromeOptions": options, "unhandledPromptBehavior": "ignore", "goog:loggingPrefs": {"performance": "ALL", "browser": "ALL"},
        }}});
        let made = browser.ask("POST", "/session", &wanted)?;
        let session = made["sessionId"].as_str().context("no session")?;
        browser.session = format!("/session/{session}");
        browser.resize(size)?;
        Ok(browser)
    }

    /// Changes the size of the page. The smallest desktop window is wider than a phone, so the size is emulated.
    ///
    /// # Errors
    /// Fails if the browser refuses the size.
    pub fn resize(&self, (width, height): (u32, u32)) -> Result<()> {
        let metrics =
            json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": false});
        self.devtools("Emulation.setDeviceMetricsOverride", &metrics)?;
        Ok(())
    }

    /// Selects the colour scheme, `light` or `dark`.
    ///
    /// # Errors
    /// Fails if the browser refuses the scheme.
    pub fn set_scheme(&self, scheme: &str) -> Result<()> {
        let features = json!({"features": [{"name": "prefers-color-scheme", "value": scheme}]});
        self.devtools("Emulation.setEmulatedMedia", &features)?;
        Ok(())
    }

    fn ask(&self, method: &str, path: &str, body: &Value) -> Result<Value> {
        let mut stream = TcpStream::connect(&self.address)?;
        stream.set_read_timeout(Some(Duration::from_secs(60)))?;
        let text = match method {
            "GET" => String::new(),
            _ => body.to_string(),
        };
        let length = text.len();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
        );
        stream.write_all(format!("{head}{text}").as_bytes())?;
        let (is_good, body) = answer(&mut BufReader::new(stream))?;
        let value: Value = serde_json::from_str(&body).context(body)?;
        ensure!(is_good, "{method} {path}: {}", value["value"]["message"]);
        Ok(value["value"].clone())
    }

    fn command(&self, method: &str, path: &str, body: &Value) -> Result<Value> {
        self.ask(method, &format!("{}{path}", self.session), body)
    }

    /// Sends a command of the Chrome DevTools protocol.
    ///
    /// # Errors
    /// Fails if the browser refuses the command.
    pub fn devtools(&self, command: &str, parameters: &Value) -> Result<Value> {
        let body = json!({"cmd": command, "params": parameters});
        self.command("POST", "/goog/cdp/execute", &body)
    }

    /// Opens an address.
    ///
    /// # Errors
    /// Fails if the address cannot be loaded.
    pub fn go(&self, address: &str) -> Result<()> {
        self.command("POST", "/url", &json!({"url": address}))?;
        Ok(())
    }

    /// Waits for an element that matches a CSS selector and returns the first match.
    ///
    /// # Errors
    /// Fails if no element appears in time.
    pub fn find(&self, selector: &str) -> Result<Element> {
        let wanted = json!({"using": "css selector", "value": selector});
        let found = wait_until(SOON, || {
            let found = self.command("POST", "/element", &wanted).ok()?;
            found[ELEMENT].as_str().map(str::to_owned)
        });
        Ok(Element(
            found.with_context(|| format!("there is no {selector}"))?,
        ))
    }

    /// Clicks an element.
    ///
    /// # Errors
    /// Fails if the element is covered or hidden.
    pub fn click(&self, element: &Element) -> Result<()> {
        self.command("POST", &format!("/element/{}/click", element.0), &json!({}))?;
        Ok(())
    }

    /// Types into an element.
    ///
    /// # Errors
    /// Fails if the element takes no keyboard input.
    pub fn type_into(&self, element: &Element, text: &str) -> Result<()> {
        let path = format!("/element/{}/value", element.0);
        self.command("POST", &path, &json!({"text": text}))?;
        Ok(())
    }

    /// Presses keys one after the other, in the focused element.
    ///
    /// # Errors
    /// Fails if the browser refuses the keys.
    pub fn press(&self, keys: &[&str]) -> Result<()> {
        let key = |kind: &str, key: &&str| json!({"type": kind, "value": key});
        let actions: Vec<Value> = keys
            .iter()
            .flat_map(|one| [key("keyDown", one), key("keyUp", one)])
            .collect();
        let body = json!({"actions": [{"type": "key", "id": "keys", "actions": actions}]});
        self.command("POST", "/actions", &body)?;
        Ok(())
    }

    /// Checks that the open dialog contains `asks`, enters `text` if given, and accepts the dialog.
    ///
    /// # Errors
    /// Fails if no dialog is open or its text differs.
    pub fn answer(&self, asks: &str, text: Option<&str>) -> Result<()> {
        let found = wait_until(SOON, || self.command("GET", "/alert/text", &json!({})).ok());
        let found = found.context("the page asks nothing")?;
        let found = found.as_str().unwrap_or_default();
        ensure!(found.contains(asks), "{found}");
        if let Some(text) = text {
            self.command("POST", "/alert/text", &json!({"text": text}))?;
        }
        self.command("POST", "/alert/accept", &json!({}))?;
        Ok(())
    }

    /// Runs a script and returns its result.
    ///
    /// # Errors
    /// Fails if the script fails.
    pub fn script(&self, script: &str) -> Result<Value> {
        self.command(
            "POST",
            "/execute/sync",
            &json!({"script": script, "args": []}),
        )
    }

    /// Runs a script with an element as its first argument and returns the result.
    ///
    /// # Errors
    /// Fails if the script fails or the element was removed.
    pub fn script_of(&self, element: &Element, script: &str) -> Result<Value> {
        let element = json!({ELEMENT: element.0});
        let body = json!({"script": script, "args": [element]});
        self.command("POST", "/execute/sync", &body)
    }

    /// Waits until a script returns true.
    ///
    /// # Errors
    /// Fails after the time limit, with the text of the page.
    pub fn until(&self, condition: &str) -> Result<()> {
        let holds = || (self.script(condition).ok()? == true).then_some(());
        wait_until(SOON, holds).with_context(|| {
            let shown = self.script("return document.body.innerText");
            format!("never: {condition}; the page shows {shown:?}")
        })
    }

    /// Returns an element's accessible name, as a screen reader would read it.
    ///
    /// # Errors
    /// Fails if the element was removed.
    pub fn label(&self, element: &Element) -> Result<String> {
        let path = format!("/element/{}/computedlabel", element.0);
        let label = self.command("GET", &path, &json!({}))?;
        Ok(label.as_str().unwrap_or_default().to_owned())
    }

    /// Returns all elements that match a selector now.
    ///
    /// # Errors
    /// Fails if the browser has ended.
    pub fn all(&self, selector: &str) -> Result<Vec<Element>> {
        let wanted = json!({"using": "css selector", "value": selector});
        let found = self.command("POST", "/elements", &wanted)?;
        let found = found.as_array().context("no list")?.iter();
        let names = found.filter_map(|one| one[ELEMENT].as_str());
        Ok(names.map(|name| Element(name.to_owned())).collect())
    }

    /// Returns the CPU times of the tasks of the page's main thread in the last `seconds`, longest first. Can be called once.
    ///
    /// # Errors
    /// Fails if the window was not opened by [`Browser::traced`].
    pub fn tasks(&self, seconds: u64) -> Result<Vec<Duration>> {
        let entries = self.command("POST", "/se/log", &json!({"type": "performance"}))?;
        let mut events: Vec<Value> = Vec::new();
        for entry in entries.as_array().context("no log")? {
            let text = entry["message"].as_str().unwrap_or_default();
            let mut entry: Value = serde_json::from_str(text)?;
            let message = &mut entry["message"];
            if message["method"] == "Tracing.dataCollected" {
                events.push(message["params"].take());
            }
        }
        let is_main = |event: &&Value| {
            event["name"] == "thread_name" && event["args"]["name"] == "CrRendererMain"
        };
        let thread = |event: &Value| (event["pid"].as_u64(), event["tid"].as_u64());
        let threads: BTreeSet<_> = events.iter().filter(is_main).map(thread).collect();
        events.retain(|event| event["name"] == "RunTask" && threads.contains(&thread(event)));
        let starts = events.iter().filter_map(|event| event["ts"].as_u64());
        let first = starts.max().context("no task was traced")?;
        let first = first.saturating_sub(seconds * 1_000_000);
        events.retain(|event| event["ts"].as_u64() >= Some(first));
        let times = events.iter().filter_map(|event| event["tdur"].as_u64());
        let mut times: Vec<Duration> = times.map(Duration::from_micros).collect();
        times.sort_unstable_by(|a, b| b.cmp(a));
        Ok(times)
    }

    /// Checks that the pages had no uncaught exception or rejection since the last call, and logged nothing to the console. The log of the
    /// browser survives reloads.
    ///
    /// # Errors
    /// Fails with the messages of the log.
    pub fn expect_no_exceptions(&self) -> Result<()> {
        let entries = self.command("POST", "/se/log", &json!({"type": "browser"}))?;
        let entries = entries.as_array().context("no log")?.iter();
        // Requests may fail: the tests refuse tokens and stop daemons.
        let exceptions = entries.filter(|entry| entry["source"] != "network");
        let messages: Vec<&Value> = exceptions.map(|entry| &entry["message"]).collect();
        ensure!(messages.is_empty(), "uncaught in the page: {messages:?}");
        Ok(())
    }

    /// Writes a screenshot of the whole page to a file.
    ///
    /// # Errors
    /// Fails if the browser returns no screenshot.
    pub fn picture(&self, file: &Path) -> Result<()> {
        let wanted = json!({"captureBeyondViewport": true});
        let taken = self.devtools("Page.captureScreenshot", &wanted)?;
        let text = taken["data"].as_str().context("no picture")?;
        std::fs::write(file, BASE64_STANDARD.decode(text)?)?;
        Ok(())
    }
}

/// Reads one HTTP response with a Content-Length, because the driver keeps the connection open. Returns success and body.
fn answer(stream: &mut impl BufRead) -> Result<(bool, String)> {
    let (mut status, mut length) = (String::new(), 0);
    stream.read_line(&mut status)?;
    loop {
        let mut line = String::new();
        stream.read_line(&mut line)?;
        if line.trim().is_empty() {
            break;
        }
        let (key, value) = line.split_once(':').context("no header")?;
        if key.eq_ignore_ascii_case("content-length") {
            length = value.trim().parse()?;
        }
    }
    let mut body = vec![0; length];
    stream.read_exact(&mut body)?;
    Ok((status.contains(" 200 "), String::from_utf8(body)?))
}

impl Drop for Browser {
    fn drop(&mut self) {
        // The browser ends with its session. The driver must be killed.
        if !self.session.is_empty() {
            self.ask("DELETE", &self.session, &json!({})).ok();
        }
        self.driver.kill().ok();
        self.driver.wait().ok();
    }
}
