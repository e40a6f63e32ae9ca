// SPDX-License-Identifier: Apache-2.0
//! A client that knows no more of HTTP than it needs, so that tests see every byte.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use serde_json::Value;

/// Longer than anything takes that works.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// What came back.
#[derive(Debug)]
pub struct Response {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Response {
    pub fn header(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().find(|(key, _)| key == name);
        found.map(|(_, value)| value.as_str())
    }

    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.body).expect("text")
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&self.body)))
    }

    /// The JSON of an answer that is no error.
    pub fn ok(&self) -> Value {
        assert_eq!(self.status, 200, "{}", String::from_utf8_lossy(&self.body));
        self.json()
    }

    /// The data of events, in their order; the last one is whatever it is.
    pub fn events(&self) -> Vec<String> {
        assert_eq!(self.status, 200, "{}", String::from_utf8_lossy(&self.body));
        let text = self.text();
        assert!(text.ends_with("\n\n"), "{text:?}");
        let events = text[..text.len() - 2].split("\n\n");
        events.map(|event| event.strip_prefix("data: ").expect(event).to_owned()).collect()
    }

    /// The chunks of a stream that has ended as it should.
    pub fn chunks(&self) -> Vec<Value> {
        let mut events = self.events();
        assert_eq!(events.pop().as_deref(), Some("[DONE]"));
        events.iter().map(|event| serde_json::from_str(event).expect(event)).collect()
    }
}

/// A connection, over which requests can go one after the other.
pub struct Connection<S: Read + Write = TcpStream> {
    stream: BufReader<S>,
}

pub fn connect(address: SocketAddr) -> Connection {
    let stream = TcpStream::connect_timeout(&address, PATIENCE).expect("a connection");
    stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    stream.set_write_timeout(Some(PATIENCE)).expect("a timeout");
    Connection::over(stream)
}

impl<S: Read + Write> Connection<S> {
    pub fn over(stream: S) -> Connection<S> {
        Connection { stream: BufReader::new(stream) }
    }

    pub fn stream(&mut self) -> &mut S {
        self.stream.get_mut()
    }

    /// Sends bytes as they are.
    pub fn send(&mut self, bytes: &[u8]) {
        self.stream.get_mut().write_all(bytes).expect("a server that reads");
    }

    /// Sends a request.
    pub fn ask(&mut self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) {
        let mut head = format!("{method} {path} HTTP/1.1\r\n");
        let mut lines: Vec<(&str, String)> = vec![("host", "localhost".into())];
        if method == "POST" {
            lines.push(("content-type", "application/json".into()));
            lines.push(("content-length", body.len().to_string()));
        }
        lines.retain(|(name, _)| !headers.iter().any(|(given, _)| given == name));
        lines.extend(headers.iter().map(|(name, value)| (*name, (*value).to_owned())));
        for (name, value) in lines {
            head += &format!("{name}: {value}\r\n");
        }
        self.send(format!("{head}\r\n").as_bytes());
        self.send(body);
    }

    fn line(&mut self) -> Option<String> {
        let mut line = String::new();
        match self.stream.read_line(&mut line) {
            Ok(0) | Err(_) => None,
            Ok(_) => Some(line.trim_end_matches(['\r', '\n']).to_owned()),
        }
    }

    /// The status and the headers of what comes back; nothing if the connection was closed.
    pub fn head(&mut self) -> Option<Response> {
        let status = self.line()?;
        let status = status.split(' ').nth(1)?.parse().expect("a status");
        let mut headers = Vec::new();
        loop {
            let line = self.line()?;
            let Some((name, value)) = line.split_once(": ") else { break };
            headers.push((name.to_ascii_lowercase(), value.to_owned()));
        }
        Some(Response { status, headers, body: Vec::new() })
    }

    /// The next chunk of a body without a length; nothing at its end.
    pub fn chunk(&mut self) -> Option<Vec<u8>> {
        let length = usize::from_str_radix(&self.line()?, 16).expect("a length");
        let mut bytes = vec![0; length];
        self.stream.read_exact(&mut bytes).ok()?;
        self.line()?;
        (length > 0).then_some(bytes)
    }

    /// All of what comes back; nothing if the connection was closed.
    pub fn response(&mut self) -> Option<Response> {
        let mut response = self.head()?;
        if let Some(length) = response.header("content-length") {
            response.body = vec![0; length.parse().expect("a length")];
            self.stream.read_exact(&mut response.body).ok()?;
        } else if response.header("transfer-encoding") == Some("chunked") {
            while let Some(chunk) = self.chunk() {
                response.body.extend(chunk);
            }
        }
        Some(response)
    }

    /// Whether the server has closed the connection.
    pub fn is_closed(&mut self) -> bool {
        matches!(self.stream.fill_buf(), Ok([]))
    }
}

pub fn get(address: SocketAddr, path: &str) -> Response {
    let mut connection = connect(address);
    connection.ask("GET", path, &[], b"");
    connection.response().expect("an answer")
}

pub fn post(address: SocketAddr, path: &str, body: &Value) -> Response {
    post_bytes(address, path, body.to_string().as_bytes())
}

pub fn post_bytes(address: SocketAddr, path: &str, body: &[u8]) -> Response {
    let mut connection = connect(address);
    connection.ask("POST", path, &[], body);
    connection.response().expect("an answer")
}
