//! d
use spanker_model::{Quant, builtin};
use spanker_plan::*;
use spanker_topology::*;
fn main(){
 let model=builtin("llama-2-70b",Quant::Q4_0).unwrap();
 let n:u64=std::env::args().nth(1).unwrap().parse().unwrap();
 let most:u64=std::env::args().nth(2).unwrap().parse().unwrap();
 let cs=(0..n).map(|index|{let rate = BytesPerSecond(1_000_000_000 + 2_000_000_000 * index / n);
        let mut card = Profile::builtin("rev-a").unwrap().with_memory_bandwidth(rate, "a made-up cluster");
        card.memory.capacity.value = Bytes((most / 2 + most / 2 * index / n) << 20);card}).collect();
 let c=Cluster::new(cs,Shape::Ring).unwrap();
 let cards:Vec<usize>=(0..n as usize).collect();
 let r=Request{sequences:8,..Request::new(Objective::Throughput)};
 let ch=choose(&model,&c,&cards,&r).unwrap();
 for x in &ch.candidates { println!("{:?} ways {} stages {} fits {} rate {:?} token {:?} terms {:?} mem0 {:?}", x.strategy, x.layout.tensor_ways(), x.layout.pipeline_stages(), x.prediction.fits(), x.prediction.tokens_per_second, x.prediction.token, x.prediction.terms, x.prediction.memory.first());
 println!("{:?}", x.layout.replicas[0].iter().map(|s|(s.group.cards.clone(), s.layers.clone(), s.group.split)).collect::<Vec<_>>());
 }
}
