// SPDX-License-Identifier: Apache-2.0
//! What encryption and framing cost: round trips over loopback between two threads, through the fabric and through plain
//! TCP sockets, which take turns. Beside the time, what both threads used of their cores.
//!
//!     cargo run --release -p spanker-fabric-tcp --example latency
//!     cargo run --release -p spanker-fabric-tcp --example latency -- 0    # sleeps at once instead of after 50 us

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use spanker_fabric::{Call, Fabric, Pool};
use spanker_fabric_tcp::{
    Channel, Event, Key, Limits, Listener, Options, Purpose, TcpError, TcpFabric, lead,
};

/// Bytes of a message, there and back.
const SIZES: [usize; 10] =
    [8, 128, 1 << 10, 2 << 10, 4 << 10, 8 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20];
/// How often the two take turns.
const TURNS: usize = 21;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let soon = Instant::now() + Duration::from_secs(600);
    let mut options = Options { timeout: Duration::from_secs(30), ..Options::new("latency") };
    if let Some(spin) = std::env::args().nth(1) {
        options.spin = Duration::from_micros(spin.parse()?);
    }
    let (mut leader, worker) = pair(&options, soon)?;
    let socket = TcpListener::bind("127.0.0.1:0")?;
    let mut plain = TcpStream::connect(socket.local_addr()?)?;
    let (mut echo, _) = socket.accept()?;
    plain.set_nodelay(true)?;
    echo.set_nodelay(true)?;
    let thread = std::thread::spawn(move || serve(worker, &mut echo, soon));
    println!("{:>9}  {:^31}  {:^31}", "", "round trip", "processor time");
    let (fabric, tcp, ratio) = ("fabric", "plain TCP", "ratio");
    println!("{:>9}{}", "bytes", format!("  {fabric:>9}  {tcp:>12}  {ratio:>6}").repeat(2));
    let mut pool = Pool::default();
    for size in SIZES {
        let rounds = rounds(size);
        let (mut with, mut without) = (Timings::default(), Timings::default());
        let mut bytes = vec![1; size];
        for _ in 0..TURNS {
            with.add(rounds, || {
                let message = pool.write(size, |out| out.fill(1));
                leader.exchange(&Call::BARRIER, &[(1, message)], &[1], soon).map(|_| ())
            })?;
            without.add(rounds, || {
                plain.write_all(&bytes)?;
                plain.read_exact(&mut bytes)
            })?;
        }
        let column = |with: &mut [f64], without: &mut [f64]| {
            let (with, without) = (median(with), median(without));
            format!("  {with:>6.1} us  {without:>9.1} us  {:>6.2}", with / without)
        };
        let wall = column(&mut with.wall, &mut without.wall);
        println!("{size:>9}{wall}{}", column(&mut with.processor, &mut without.processor));
    }
    drop((leader, plain));
    thread.join().map_err(|_| "the other end panicked")??;
    Ok(())
}

/// Microseconds of each turn's round trips.
#[derive(Default)]
struct Timings {
    wall: Vec<f64>,
    processor: Vec<f64>,
}

impl Timings {
    fn add<E>(&mut self, rounds: usize, mut turn: impl FnMut() -> Result<(), E>) -> Result<(), E> {
        let (begun, used) = (Instant::now(), processor_time());
        for _ in 0..rounds {
            turn()?;
        }
        self.wall.push(begun.elapsed().as_secs_f64() * 1e6 / rounds as f64);
        self.processor.push((processor_time() - used) * 1e6 / rounds as f64);
        Ok(())
    }
}

/// Seconds that the threads of this process have run.
fn processor_time() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// Round trips of a turn.
fn rounds(size: usize) -> usize {
    (2_000_000 / (size + 4_000)).clamp(8, 300)
}

/// Both ends of a group of two.
fn pair(options: &Options, soon: Instant) -> Result<(TcpFabric, TcpFabric), TcpError> {
    let key = Key::generate()?;
    let listener = Listener::bind("127.0.0.1:0", Some(key.clone()), Limits::USUAL)?;
    let address = listener.address().to_string();
    std::thread::scope(|scope| {
        let worker = scope.spawn(|| match listener.next(soon)?.next(0, soon)? {
            Event::Join(join) => Ok(join.accept(&listener, options)?.0),
            Event::Message(..) => Err(TcpError::Request { reason: "not a group".into() }),
        });
        let channel = Channel::dial(&address, Some(&key), Purpose::Control, options.timeout)?;
        let (leader, _) = lead(vec![channel], options)?;
        Ok((leader, worker.join().expect("no panic")?))
    })
}

/// Sends everything back, in the order in which the other end takes turns.
fn serve(
    mut fabric: TcpFabric,
    plain: &mut TcpStream,
    soon: Instant,
) -> Result<(), std::io::Error> {
    for size in SIZES {
        let rounds = rounds(size);
        let mut bytes = vec![0; size];
        for _ in 0..TURNS {
            for _ in 0..rounds {
                let messages = fabric.exchange(&Call::BARRIER, &[], &[0], soon);
                let message = messages.map_err(std::io::Error::other)?.remove(0);
                let sent = fabric.exchange(&Call::BARRIER, &[(0, message)], &[], soon);
                sent.map_err(std::io::Error::other)?;
            }
            for _ in 0..rounds {
                plain.read_exact(&mut bytes)?;
                plain.write_all(&bytes)?;
            }
        }
    }
    Ok(())
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
