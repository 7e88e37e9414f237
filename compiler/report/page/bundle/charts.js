// The parts of Apache ECharts that the page of a plan uses.
export { init, use, getInstanceByDom } from "echarts/core";
import { use } from "echarts/core";
import { BarChart, CustomChart, LineChart, ScatterChart } from "echarts/charts";
import {
  AriaComponent, DataZoomComponent, GridComponent, LegendComponent, MarkLineComponent, TooltipComponent,
} from "echarts/components";
import { CanvasRenderer } from "echarts/renderers";

use([
  BarChart, CustomChart, LineChart, ScatterChart, AriaComponent, DataZoomComponent, GridComponent, LegendComponent,
  MarkLineComponent, TooltipComponent, CanvasRenderer,
]);
