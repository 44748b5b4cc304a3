//! A TCP proxy between a client and the server whose connections can be made to break, to hang and to be slow.

use crate::record::lock;
use std::sync::atomic::{AtomicU16, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

/// What happens to the bytes of a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    Open,
    /// Nothing passes in either direction; connections stay open. What was sent meanwhile arrives afterwards.
    BlackHole,
    /// Answers arrive this much later.
    Late(Duration),
    /// One of this many requests breaks its connection: before the server gets it, after that, or in the answer. Small
    /// requests pass, so that logins and heartbeats do not fail again and again.
    Breaking(u32),
    /// Connections are closed, new ones too.
    Closed,
}

/// Requests below this size pass in [`Mode::Breaking`]. An exchange of jobs is larger.
const SMALL: usize = 200;

/// The way of one client to the server.
#[derive(Clone)]
pub(crate) struct Link {
    port: u16,
    mode: Arc<watch::Sender<Mode>>,
    /// Changes when all open connections are to be closed.
    epoch: Arc<watch::Sender<u64>>,
    random: Arc<Mutex<fastrand::Rng>>,
    broken: Arc<AtomicUsize>,
}

impl Link {
    /// A link to the server, whose port may change when it is restarted.
    pub(crate) async fn open(server: Arc<AtomicU16>, random: fastrand::Rng) -> std::io::Result<Link> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let link = Link {
            port: listener.local_addr()?.port(),
            mode: Arc::new(watch::Sender::new(Mode::Open)),
            epoch: Arc::new(watch::Sender::new(0)),
            random: Arc::new(Mutex::new(random)),
            broken: Arc::new(AtomicUsize::new(0)),
        };
        tokio::spawn(link.clone().accept(listener, server));
        Ok(link)
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    pub(crate) fn set(&self, mode: Mode) {
        self.mode.send_replace(mode);
        if mode == Mode::Closed {
            self.reset();
        }
    }

    /// Closes all open connections.
    pub(crate) fn reset(&self) {
        self.epoch.send_modify(|epoch| *epoch += 1);
    }

    /// How many connections `Breaking` has broken.
    pub(crate) fn broken(&self) -> usize {
        self.broken.load(Ordering::Relaxed)
    }

    async fn accept(self, listener: TcpListener, server: Arc<AtomicU16>) {
        loop {
            let Ok((client, _)) = listener.accept().await else {
                tokio::time::sleep(Duration::from_millis(10)).await;
                continue;
            };
            if *self.mode.borrow() == Mode::Closed {
                continue;
            }
            let (link, port) = (self.clone(), server.load(Ordering::Relaxed));
            tokio::spawn(async move {
                let mut epoch = link.epoch.subscribe();
                if let Ok(server) = TcpStream::connect(("127.0.0.1", port)).await {
                    let _ = client.set_nodelay(true);
                    let _ = server.set_nodelay(true);
                    tokio::select! {
                        () = link.connect(client, server) => {}
                        _ = epoch.changed() => {}
                    }
                }
            });
        }
    }

    /// Passes bytes on until either side closes or the connection is broken.
    async fn connect(&self, client: TcpStream, server: TcpStream) {
        let (from_client, to_client) = client.into_split();
        let (from_server, to_server) = server.into_split();
        let (breaking, broken) = watch::channel(None);
        let (queue, queued) = mpsc::channel(64);
        tokio::select! {
            () = self.requests(from_client, to_server, breaking) => {}
            () = self.answers(from_server, queue) => {}
            () = self.deliver(queued, to_client, broken) => {}
        }
    }

    async fn requests(
        &self,
        mut client: OwnedReadHalf,
        mut server: OwnedWriteHalf,
        breaking: watch::Sender<Option<usize>>,
    ) {
        let mut bytes = vec![0; 64 * 1024];
        loop {
            let count = client.read(&mut bytes).await.unwrap_or(0);
            if count == 0 {
                return;
            }
            self.passable().await;
            let Mode::Breaking(one_in) = *self.mode.borrow() else {
                if server.write_all(&bytes[..count]).await.is_err() {
                    return;
                }
                continue;
            };
            let (breaks, how, limit) = {
                let mut random = lock(&self.random);
                (count >= SMALL && random.u32(..one_in) == 0, random.u8(..3), random.usize(..6) * 1500)
            };
            if breaks {
                self.broken.fetch_add(1, Ordering::Relaxed);
                if how == 0 {
                    return;
                }
            }
            if server.write_all(&bytes[..count]).await.is_err() || (breaks && how == 1) {
                return;
            }
            if breaks {
                breaking.send_replace(Some(limit));
            }
        }
    }

    async fn answers(&self, mut server: OwnedReadHalf, queue: mpsc::Sender<(Instant, Vec<u8>)>) {
        let mut bytes = vec![0; 64 * 1024];
        loop {
            let count = server.read(&mut bytes).await.unwrap_or(0);
            self.passable().await;
            let late = match *self.mode.borrow() {
                Mode::Late(late) => late,
                _ => Duration::ZERO,
            };
            // An empty chunk tells `deliver` that the server has closed the connection.
            if queue.send((Instant::now() + late, bytes[..count].to_vec())).await.is_err() {
                return;
            }
            if count == 0 {
                return std::future::pending().await;
            }
        }
    }

    async fn deliver(
        &self,
        mut queue: mpsc::Receiver<(Instant, Vec<u8>)>,
        mut client: OwnedWriteHalf,
        broken: watch::Receiver<Option<usize>>,
    ) {
        while let Some((at, bytes)) = queue.recv().await {
            tokio::time::sleep_until(at).await;
            self.passable().await;
            let limit = *broken.borrow();
            let part = &bytes[..bytes.len().min(limit.unwrap_or(usize::MAX))];
            if bytes.is_empty() || client.write_all(part).await.is_err() || limit.is_some() {
                return;
            }
        }
    }

    /// Returns when the link is not a black hole.
    async fn passable(&self) {
        let mut mode = self.mode.subscribe();
        let _ = mode.wait_for(|mode| *mode != Mode::BlackHole).await;
    }
}
